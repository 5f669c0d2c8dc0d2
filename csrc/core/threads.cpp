#include "core/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

namespace tensorizer {
namespace {

unsigned schedulable_cpus() {
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return static_cast<unsigned>(CPU_COUNT(&mask));
#endif
  return std::max(1U, std::thread::hardware_concurrency());
}

// cgroup v2: "max 100000" or "200000 100000" (microseconds of CPU per period).
std::optional<double> quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return std::nullopt;
  return std::strtod(quota.c_str(), nullptr) / period;
}

std::optional<double> quota_v1(const std::string& folder) {
  double quota = 0, period = 0;
  std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
  std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// The strictest quota on the way from this process's cgroup to the root.
std::optional<double> cgroup_quota() {
  std::optional<double> strictest;
  std::ifstream cgroups("/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    const bool v1_cpu = ("," + controllers + ",").find(",cpu,") != std::string::npos;
    if (!v2 && !v1_cpu) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      auto quota = v2 ? quota_v2(root + path) : quota_v1(root + path);
      if (quota && (!strictest || *quota < *strictest)) strictest = quota;
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return strictest;
}

unsigned measure() {
  unsigned cpus = std::max(1U, schedulable_cpus());
  if (auto quota = cgroup_quota()) {
    cpus = std::min(cpus, static_cast<unsigned>(std::max(1.0, std::ceil(*quota))));
  }
  return cpus;
}

}  // namespace

unsigned cpu_quota() noexcept {
  // No static that others wait for while it is made: a forked child would wait for ever.
  static constinit std::atomic<unsigned> known{0};
  unsigned cpus = known.load(std::memory_order_relaxed);
  if (cpus > 0) return cpus;
  try {
    cpus = measure();
  } catch (...) {
    cpus = 1;
  }
  known.store(cpus, std::memory_order_relaxed);
  return cpus;
}

}  // namespace tensorizer
