// Connections of this process to the hosts that it asks: how many requests run at the same time,
// and the connections that wait for the next one. All sources and uploads of a process share them.
#pragma once

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>

#include "core/sync.h"
#include "io/curl/curl_socket.h"

namespace tensorizer::io {

// How many requests of one source run at the same time: a fixed number, or 16, or 32 for a server
// that takes long to answer. Each time a server says that it is overloaded there are half as many,
// and after a while twice as many again. Pure: time is an argument. Confined to its owner's lock.
class ConnectionCount {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // `fixed` if not zero; never more than `most`.
  ConnectionCount(unsigned fixed, unsigned most) noexcept;

  unsigned at(TimePoint now) noexcept;
  // The same where no server is overloaded.
  unsigned most() const noexcept;
  void fix(unsigned count) noexcept;
  void note_latency(std::chrono::duration<double> latency) noexcept;
  // A request that began at `begun` was refused at `now`.
  void note_overload(TimePoint begun, TimePoint now) noexcept;

 private:
  unsigned most_;
  unsigned fixed_;
  bool far_ = false;
  unsigned halvings_ = 0;
  TimePoint changed_{};
};

// What one request uses: a lane for libcurl, and a socket for direct_read.
struct HttpLane {
  CurlLane curl;
  std::unique_ptr<CurlSocket> socket;  // of the last direct read, if it can be used again
};

// What one source or uploader has of them. Safe from many threads.
class HttpConnections {
 public:
  // `fixed`: see ConnectionCount. `most`: requests at the same time to one host, those of everybody
  // else included. `key`: what connections may be shared with, beyond what libcurl compares itself.
  HttpConnections(unsigned fixed, unsigned most, std::string key)
      : most_(most), key_(std::move(key)), count_(fixed, most) {}
  ~HttpConnections();
  HttpConnections(const HttpConnections&) = delete;
  HttpConnections& operator=(const HttpConnections&) = delete;

  // Permission for one request, and the lane that it goes over. Gives both back.
  class Permit;
  // Waits for a place; throws Errc::cancelled on a stop.
  Permit enter(const std::string& origin, const std::stop_token& stop);

  unsigned most() const;
  void fix(unsigned count);
  void note_latency(std::chrono::duration<double> latency);
  void note_overload(const Permit& permit);

  // Ends connections that wait, unless others use them, and those that are busy when they come
  // back. Later requests open new ones.
  void close() noexcept;

 private:
  friend class HttpPool;

  const unsigned most_;
  const std::string key_;
  mutable Mutex mutex_;
  ConnectionCount count_ GUARDED_BY(mutex_);
};

class HttpPool;
struct HttpHost;

class HttpConnections::Permit {
 public:
  Permit() = default;
  Permit(Permit&& other) noexcept { *this = std::move(other); }
  Permit& operator=(Permit&& other) noexcept;
  ~Permit();

  HttpLane& lane() const noexcept { return *lane_; }
  explicit operator bool() const noexcept { return lane_ != nullptr; }
  // False in a child that was forked.
  bool is_of_this_process() const noexcept;
  // Others may send a request; the lane stays.
  void leave() noexcept;

 private:
  friend class HttpPool;
  friend class HttpConnections;

  HttpPool* pool_ = nullptr;
  const HttpConnections* user_ = nullptr;
  std::shared_ptr<HttpHost> host_;
  std::unique_ptr<HttpLane> lane_;
  bool has_place_ = false;
  ConnectionCount::TimePoint begun_{};
};

}  // namespace tensorizer::io
