#include "io/http/http_connections.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "core/error.h"
#include "core/per_process.h"

namespace tensorizer::io {
namespace {

// Internally locked.
class Hosts {
 public:
  std::shared_ptr<HostConnections> of(const std::string& origin) {
    MutexLock lock(mutex_);
    std::weak_ptr<HostConnections>& known = hosts_[origin];
    if (auto host = known.lock()) return host;
    std::erase_if(hosts_, [](const auto& entry) { return entry.second.expired(); });
    auto host = std::make_shared<HostConnections>();
    hosts_[origin] = host;
    return host;
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::weak_ptr<HostConnections>> hosts_ GUARDED_BY(mutex_);
};

PerProcess<Hosts> hosts_of_process;

}  // namespace

std::shared_ptr<HostConnections> HostConnections::of(const std::string& origin) {
  return hosts_of_process.get().of(origin);
}

HostConnections::HostConnections() : process_(getpid()) {}

bool HostConnections::belongs_to_this_process() const noexcept { return getpid() == process_; }

void HostConnections::enter(unsigned limit, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  const auto has_place = [this, limit]() REQUIRES_LOCK(mutex_) { return running_ < limit; };
  if (!left_.wait(mutex_, stop, has_place)) throw Error(Errc::cancelled, "cancelled");
  ++running_;
}

void HostConnections::leave() noexcept {
  if (!belongs_to_this_process()) return;
  MutexLock lock(mutex_);
  --running_;
  left_.notify_all();  // limits differ: who is woken may have to wait on
}

bool HostConnections::has_place(unsigned limit) const {
  MutexLock lock(mutex_);
  return running_ < limit;
}

std::unique_ptr<CurlLane> HostConnections::take(const std::string& key, unsigned limit) {
  std::unique_ptr<CurlLane> lane;
  std::unique_ptr<CurlLane> in_the_way;  // ends outside the lock
  {
    MutexLock lock(mutex_);
    const auto found = std::find_if(waiting_.rbegin(), waiting_.rend(),
                                    [&](const Waiting& waiting) { return waiting.key == key; });
    if (found != waiting_.rend()) {
      lane = std::move(found->lane);
      waiting_.erase(std::next(found).base());
    } else if (!waiting_.empty() && waiting_.size() + running_ > limit) {
      in_the_way = std::move(waiting_.front().lane);
      waiting_.erase(waiting_.begin());
    }
  }
  return lane ? std::move(lane) : std::make_unique<CurlLane>();
}

void HostConnections::give_back(const std::string& key, std::unique_ptr<CurlLane> lane) noexcept {
  if (!lane->belongs_to_this_process()) return;
  MutexLock lock(mutex_);
  if (users_ == 0) return;
  try {
    waiting_.push_back({key, std::move(lane)});
  } catch (const std::bad_alloc&) {
    // the lane ends its connections instead
  }
}

void HostConnections::add_user() {
  MutexLock lock(mutex_);
  ++users_;
}

void HostConnections::remove_user() noexcept {
  if (!belongs_to_this_process()) return;
  std::vector<Waiting> lanes;
  MutexLock lock(mutex_);
  if (--users_ == 0) lanes.swap(waiting_);
}

std::shared_ptr<HostConnections> HttpConnections::host(const std::string& origin) {
  MutexLock lock(mutex_);
  std::shared_ptr<HostConnections>& known = hosts_[origin];
  if (known && known->belongs_to_this_process()) return known;
  known = HostConnections::of(origin);
  known->add_user();
  return known;
}

HttpConnections::Ticket HttpConnections::enter(const std::string& origin,
                                               const std::stop_token& stop) {
  auto found = host(origin);
  found->enter(limit_, stop);
  return Ticket(std::move(found));
}

HttpConnections::Lease HttpConnections::take(const std::string& origin) {
  return {host(origin), key_, limit_};
}

bool HttpConnections::has_place(const std::string& origin) {
  return host(origin)->has_place(limit_);
}

void HttpConnections::close() noexcept {
  std::map<std::string, std::shared_ptr<HostConnections>> hosts;
  {
    MutexLock lock(mutex_);
    hosts.swap(hosts_);
  }
  for (const auto& [origin, host] : hosts) host->remove_user();
}

}  // namespace tensorizer::io
