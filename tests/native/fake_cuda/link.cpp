#include "link.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "model.h"

namespace fake_cuda {
namespace {

using Duration = LinkModel::Clock::duration;

Duration microseconds(double us) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double, std::micro>(us));
}

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

const char* name_of(size_t engine) {
  constexpr const char* kNames[] = {"none", "up", "down", "kernel"};
  return kNames[engine];
}

}  // namespace

LinkModel::LinkModel(int devices) : queues_(static_cast<size_t>(devices)) {
  if (const char* text = std::getenv("FAKE_CUDA_MODEL")) configure(text);
}

void LinkModel::configure(const char* text) {
  const std::lock_guard lock(mutex_);
  gbps_ = down_gbps_ = host_gbps_ = kernel_gbps_ = 0;
  copy_us_ = call_us_ = pin_us_per_mib_ = alloc_us_ = alloc_us_per_mib_ = launch_us_ = jit_ms_ = 0;
  engines_ = 1;
  discard_ = false;
  on_ = *text != '\0';
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    const size_t equals = item.find('=');
    const std::string name = item.substr(0, equals);
    const double value = equals == std::string::npos ? 0 : std::atof(item.c_str() + equals + 1);
    const std::pair<const char*, double*> numbers[] = {{"gbps", &gbps_},
                                                       {"down_gbps", &down_gbps_},
                                                       {"host_gbps", &host_gbps_},
                                                       {"kernel_gbps", &kernel_gbps_},
                                                       {"copy_us", &copy_us_},
                                                       {"call_us", &call_us_},
                                                       {"pin_us_per_mib", &pin_us_per_mib_},
                                                       {"alloc_us", &alloc_us_},
                                                       {"alloc_us_per_mib", &alloc_us_per_mib_},
                                                       {"launch_us", &launch_us_},
                                                       {"jit_ms", &jit_ms_}};
    const auto found = std::find_if(std::begin(numbers), std::end(numbers),
                                    [&](const auto& number) { return name == number.first; });
    if (found != std::end(numbers)) {
      *found->second = value;
    } else if (name == "engines") {
      engines_ = std::max(1U, static_cast<unsigned>(value));
    } else if (name == "discard") {
      discard_ = value != 0;
    } else {
      violation("FAKE_CUDA_MODEL has no " + name);
    }
  }
  if (down_gbps_ == 0) down_gbps_ = gbps_;
  for (auto& device : queues_)
    for (auto& kind : device) kind.assign(engines_, {});
}

Duration LinkModel::length(const Cost& cost) const {
  const double gbps = cost.engine == Engine::up     ? gbps_
                      : cost.engine == Engine::down ? down_gbps_
                                                    : kernel_gbps_;
  const double fixed = cost.engine == Engine::kernel ? launch_us_ : copy_us_;
  return microseconds(cost.count * fixed +
                      (gbps > 0 ? static_cast<double>(cost.nbytes) / (1e3 * gbps) : 0));
}

LinkModel::Clock::time_point LinkModel::book(int device, const Cost& cost) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (!on_ || cost.engine == Engine::none) return now;
  const auto kind = static_cast<size_t>(cost.engine);
  auto& queues = queues_[static_cast<size_t>(device)][kind];
  Queue& queue =
      *std::min_element(queues.begin(), queues.end(),
                        [](const Queue& a, const Queue& b) { return a.free_at < b.free_at; });
  auto begin = std::max(now, queue.free_at);
  if (host_gbps_ > 0 && cost.engine != Engine::kernel) {
    begin = std::max(begin, host_free_at_[kind]);
    host_free_at_[kind] =
        begin + microseconds(static_cast<double>(cost.nbytes) / (1e3 * host_gbps_));
  }
  const auto end = begin + length(cost);
  if (cost.engine == Engine::up && !copied_) {
    copied_ = true;
    pinned_at_first_copy_ = pinned_nbytes_;
  }
  if (queue.count == 0) {
    queue.first = begin;
  } else {
    queue.longest_gap = std::max(queue.longest_gap, begin - queue.free_at);
  }
  queue.free_at = queue.last = end;
  queue.busy += end - begin;
  queue.nbytes += cost.nbytes;
  queue.count += cost.count;
  return end;
}

void LinkModel::spend_call() const {
  if (!on_ || call_us_ == 0) return;
  const auto end = Clock::now() + microseconds(call_us_);
  while (Clock::now() < end) {
  }
}

void LinkModel::pin(uint64_t nbytes) {
  if (!on_ || pin_us_per_mib_ == 0) return;
  const std::lock_guard lock(pinning_);
  std::this_thread::sleep_for(
      microseconds(pin_us_per_mib_ * static_cast<double>(nbytes) / (1 << 20)));
}

void LinkModel::allocate(uint64_t nbytes) const {
  if (!on_) return;
  std::this_thread::sleep_for(
      microseconds(alloc_us_ + alloc_us_per_mib_ * static_cast<double>(nbytes) / (1 << 20)));
}

void LinkModel::load_module() const {
  if (on_) std::this_thread::sleep_for(microseconds(1000 * jit_ms_));
}

std::string LinkModel::report() {
  const std::lock_guard lock(mutex_);
  std::ostringstream text;
  text << "{\"pinned_at_first_copy\": " << pinned_at_first_copy_ << ", \"engines\": [";
  const char* comma = "";
  for (size_t device = 0; device < queues_.size(); ++device) {
    for (size_t kind = 0; kind < kKinds; ++kind) {
      for (Queue& queue : queues_[device][kind]) {
        if (queue.count == 0) continue;
        text << comma << "{\"device\": " << device << ", \"engine\": \"" << name_of(kind)
             << "\", \"bytes\": " << queue.nbytes << ", \"count\": " << queue.count
             << ", \"busy\": " << seconds(queue.busy)
             << ", \"first\": " << seconds(queue.first - since_)
             << ", \"last\": " << seconds(queue.last - since_)
             << ", \"gap\": " << seconds(queue.longest_gap) << "}";
        comma = ", ";
        queue = {.free_at = queue.free_at};
      }
    }
  }
  text << "]}";
  since_ = Clock::now();
  copied_ = false;
  return text.str();
}

}  // namespace fake_cuda
