#include "io/http/http_connections.h"

#include <algorithm>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/per_process.h"

namespace tensorizer::io {

// One origin (scheme, host, port), for all who use it. The lock of its pool guards it.
struct HttpHost {
  struct Waiting {
    std::string key;
    std::unique_ptr<HttpCarrier> carrier;
  };
  const std::string origin;
  unsigned running = 0;
  unsigned users = 0;
  std::vector<Waiting> waiting;
};

// Internally locked. A child that was forked has one of its own, in which nothing runs.
class HttpPool {
 public:
  UniqueHttpPermit enter(HttpConnections& user, const std::string& origin, bool prefers_socket,
                         const std::stop_token& stop);
  void leave(HttpPermit& permit) noexcept;
  // The same; the connection waits for the next request, or ends.
  void end(HttpPermit& permit) noexcept;
  // Ends the connections that nobody else uses.
  void close(const HttpConnections& user, bool for_ever) noexcept;

 private:
  struct User {
    unsigned running = 0;
    std::map<std::string, std::shared_ptr<HttpHost>> hosts;
  };
  std::shared_ptr<HttpHost> host_of(User& user, const std::string& origin) REQUIRES_LOCK(mutex_);
  void give_place_back(HttpPermit& permit) noexcept REQUIRES_LOCK(mutex_);
  // Where anybody uses its origin.
  void keep(HttpPermit& permit) noexcept;

  Mutex mutex_;
  CondVar left_;
  std::map<const HttpConnections*, User> users_ GUARDED_BY(mutex_);
  std::map<std::string, std::weak_ptr<HttpHost>> hosts_ GUARDED_BY(mutex_);
};

namespace {

constexpr unsigned kNear = 16;
// Object stores answer after 10 to 100 ms and bound the rate of a connection: with 32, a load of
// benchmarks' http-object-store (20 ms, 80 MB/s) took 1.4 times as long.
constexpr unsigned kFar = 64;
constexpr std::chrono::milliseconds kFarLatency{10};
constexpr std::chrono::seconds kCalm{10};

using Clock = std::chrono::steady_clock;

PerProcess<HttpPool> pool_of_process;

}  // namespace

ConnectionCount::ConnectionCount(unsigned fixed, unsigned most) noexcept
    : most_(std::max(1u, most)), fixed_(std::min(fixed, most_)) {}

unsigned ConnectionCount::calm() const {
  return fixed_ > 0 ? fixed_ : std::min(most_, far_ ? kFar : kNear);
}

unsigned ConnectionCount::count(TimePoint now) {
  for (; halvings_ > 0 && now - changed_ >= kCalm; changed_ += kCalm) --halvings_;
  return std::max(1u, calm() >> halvings_);
}

unsigned ConnectionCount::most() const {
  MutexLock lock(mutex_);
  return calm();
}

unsigned ConnectionCount::at(TimePoint now) {
  MutexLock lock(mutex_);
  return count(now);
}

void ConnectionCount::fix(unsigned count) {
  MutexLock lock(mutex_);
  fixed_ = std::clamp(count, 1u, most_);
  halvings_ = 0;
}

void ConnectionCount::note_latency(std::chrono::duration<double> latency) {
  MutexLock lock(mutex_);
  far_ = latency >= kFarLatency;
}

void ConnectionCount::note_overload(TimePoint begun, TimePoint now) {
  MutexLock lock(mutex_);
  // One overload makes many requests fail; those that began before the number changed say no more.
  if (fixed_ > 0 || begun < changed_ || count(now) == 1) return;
  ++halvings_;
  changed_ = now;
}

std::shared_ptr<HttpHost> HttpPool::host_of(User& user, const std::string& origin) {
  std::shared_ptr<HttpHost>& mine = user.hosts[origin];
  if (mine) return mine;
  std::erase_if(hosts_, [](const auto& entry) { return entry.second.expired(); });
  mine = hosts_[origin].lock();
  if (!mine) hosts_[origin] = mine = std::make_shared<HttpHost>(HttpHost{.origin = origin});
  ++mine->users;
  return mine;
}

UniqueHttpPermit HttpPool::enter(HttpConnections& connections, const std::string& origin,
                                 bool prefers_socket, const std::stop_token& stop) {
  UniqueHttpPermit permit;
  std::unique_ptr<HttpCarrier> in_the_way;  // ends outside the lock
  {
    MutexLock lock(mutex_);
    User& user = users_[&connections];
    const std::shared_ptr<HttpHost> host = host_of(user, origin);
    const auto has_place = [&]() REQUIRES_LOCK(mutex_) {
      return host->running < connections.most && user.running < connections.count.at(Clock::now());
    };
    if (!left_.wait(mutex_, stop, has_place)) throw Error(Errc::cancelled, "cancelled");
    permit = std::make_unique<HttpPermit>(*this, connections, host);
    ++host->running;
    ++user.running;
    permit->has_place_ = true;
    permit->begun_ = Clock::now();
    std::vector<HttpHost::Waiting>& waiting = host->waiting;
    const auto take = [&](bool any_kind) {
      const auto found = std::find_if(waiting.rbegin(), waiting.rend(), [&](const auto& entry) {
        return entry.key == connections.key &&
               (any_kind || entry.carrier->has_socket() == prefers_socket);
      });
      if (found == waiting.rend()) return false;
      permit->carrier_ = std::move(found->carrier);
      waiting.erase(std::next(found).base());
      return true;
    };
    const bool is_full = waiting.size() + host->running > connections.most;
    if (!take(false) && is_full && !take(true) && !waiting.empty()) {
      in_the_way = std::move(waiting.front().carrier);
      waiting.erase(waiting.begin());
    }
  }
  if (!permit->carrier_) permit->carrier_ = std::make_unique<HttpCarrier>();
  return permit;
}

void HttpPool::give_place_back(HttpPermit& permit) noexcept {
  if (!std::exchange(permit.has_place_, false)) return;
  --users_[&permit.user_].running;
  --permit.host_->running;
  left_.notify_all();  // limits differ: who is woken may have to wait on
}

void HttpPool::leave(HttpPermit& permit) noexcept {
  MutexLock lock(mutex_);
  give_place_back(permit);
}

void HttpPool::end(HttpPermit& permit) noexcept {
  keep(permit);
  permit.carrier_.reset();  // before another one may take the place; outside the lock
  leave(permit);
}

void HttpPool::keep(HttpPermit& permit) noexcept {
  if (!permit.carrier_ || (!permit.carrier_->has_curl() && !permit.carrier_->has_socket())) return;
  MutexLock lock(mutex_);
  if (permit.host_->users == 0) return;
  give_place_back(permit);
  try {
    permit.host_->waiting.push_back({permit.user_.key, nullptr});
    permit.host_->waiting.back().carrier = std::move(permit.carrier_);
  } catch (const std::bad_alloc&) {
    // the carrier ends its connections instead
  }
}

void HttpPool::close(const HttpConnections& connections, bool for_ever) noexcept {
  std::map<std::string, std::shared_ptr<HttpHost>> hosts;
  std::vector<std::vector<HttpHost::Waiting>> ended;  // outside the lock
  MutexLock lock(mutex_);
  const auto user = users_.find(&connections);
  if (user == users_.end()) return;
  hosts.swap(user->second.hosts);
  if (for_ever) users_.erase(user);
  for (const auto& [origin, host] : hosts)
    if (--host->users == 0) ended.push_back(std::exchange(host->waiting, {}));
}

HttpConnections::~HttpConnections() { pool_of_process.get().close(*this, true); }

void HttpConnections::close() noexcept { pool_of_process.get().close(*this, false); }

UniqueHttpPermit HttpConnections::enter(const std::string& origin, bool prefers_socket,
                                        const std::stop_token& stop) {
  return pool_of_process.get().enter(*this, origin, prefers_socket, stop);
}

void HttpConnections::enter_again(UniqueHttpPermit& permit, const std::string& origin,
                                  const std::stop_token& stop) {
  permit.reset();  // first: who held one place and waited for another could wait for ever
  permit = enter(origin, false, stop);
}

const std::string& HttpPermit::origin() const noexcept { return host_->origin; }

bool HttpPermit::is_of_this_process() const noexcept { return &pool_ == &pool_of_process.get(); }

void HttpPermit::leave() noexcept {
  if (is_of_this_process()) pool_.leave(*this);
}

HttpPermit::~HttpPermit() {
  if (is_of_this_process()) pool_.end(*this);
}

}  // namespace tensorizer::io
