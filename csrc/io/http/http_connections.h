// Connections of this process to the hosts that it asks: how many requests run at the same time,
// and the connections that wait for the next one. All sources and uploads of a process share them.
// To one host there are never more than HttpOptions::max_connections; a body that rests between
// reads keeps its own beyond them.
#pragma once

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>

#include "core/sync.h"
#include "io/curl/curl_socket.h"

namespace tensorizer::io {

// How many requests of one source run at the same time: a fixed number, or 16, or 64 for a server
// that takes long to answer. Each time a server says that it is overloaded there are half as many,
// and after a while twice as many again. Time is an argument. Internally locked.
class ConnectionCount {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // `fixed` if not zero; never more than `most`.
  ConnectionCount(unsigned fixed, unsigned most) noexcept;

  unsigned at(TimePoint now);
  // The same where no server is overloaded.
  unsigned most() const;
  void fix(unsigned count);
  void note_latency(std::chrono::duration<double> latency);
  // A request that began at `begun` was refused at `now`.
  void note_overload(TimePoint begun, TimePoint now);

 private:
  unsigned calm() const REQUIRES_LOCK(mutex_);
  unsigned count(TimePoint now) REQUIRES_LOCK(mutex_);

  const unsigned most_;
  mutable Mutex mutex_;
  unsigned fixed_ GUARDED_BY(mutex_);
  bool far_ GUARDED_BY(mutex_) = false;
  unsigned halvings_ GUARDED_BY(mutex_) = 0;
  TimePoint changed_ GUARDED_BY(mutex_){};
};

// What one request goes over: a connection of libcurl's, or a socket for direct_read. Never both: a
// place at a host is one connection. Confined to one thread at a time.
class HttpCarrier {
 public:
  bool has_curl() const noexcept { return curl_ != nullptr; }
  bool has_socket() const noexcept { return socket_ != nullptr; }
  // Ends the socket.
  CurlDriver& curl() {
    socket_.reset();
    if (!curl_) curl_ = std::make_unique<CurlDriver>();
    return *curl_;
  }
  // Of the last direct read, or nullptr; ends the connection of libcurl.
  std::unique_ptr<CurlSocket>& socket() noexcept {
    curl_.reset();
    return socket_;
  }
  // The next request opens a new connection.
  void close() noexcept {
    curl_.reset();
    socket_.reset();
  }

 private:
  std::unique_ptr<CurlDriver> curl_;
  std::unique_ptr<CurlSocket> socket_;
};

class HttpConnections;
class HttpPool;
struct HttpHost;

// Permission for one request, and the carrier that it goes over. Gives both back.
class HttpPermit {
 public:
  HttpPermit(HttpPool& pool, const HttpConnections& user, std::shared_ptr<HttpHost> host) noexcept
      : pool_(pool), user_(user), host_(std::move(host)) {}
  ~HttpPermit();
  HttpPermit(const HttpPermit&) = delete;
  HttpPermit& operator=(const HttpPermit&) = delete;

  HttpCarrier& carrier() const noexcept { return *carrier_; }
  const std::string& origin() const noexcept;
  ConnectionCount::TimePoint begun() const noexcept { return begun_; }
  // Others may send a request; the carrier stays.
  void leave() noexcept;

 private:
  friend class HttpPool;

  // False in a child that was forked.
  bool is_of_this_process() const noexcept;

  HttpPool& pool_;
  const HttpConnections& user_;
  const std::shared_ptr<HttpHost> host_;
  std::unique_ptr<HttpCarrier> carrier_;
  bool has_place_ = false;
  ConnectionCount::TimePoint begun_{};
};
using UniqueHttpPermit = std::unique_ptr<HttpPermit>;

// What one source or uploader has of them. Outlives its permits. Safe from many threads.
class HttpConnections {
 public:
  // `fixed`: see ConnectionCount. `most_at_host`: connections to one host, those of everybody else
  // included. `shared_key`: what connections may be shared with, beyond what libcurl
  // compares itself.
  HttpConnections(unsigned fixed, unsigned most_at_host, std::string shared_key)
      : most(most_at_host), key(std::move(shared_key)), count(fixed, most_at_host) {}
  ~HttpConnections();
  HttpConnections(const HttpConnections&) = delete;
  HttpConnections& operator=(const HttpConnections&) = delete;

  // Waits for a place; throws Errc::cancelled on a stop. The carrier has a connection of the kind
  // that is preferred, or none yet, and one of the other kind where no further one may be opened.
  UniqueHttpPermit enter(const std::string& origin, bool prefers_socket,
                         const std::stop_token& stop);
  // Gives up the place, and takes one at `origin` with a connection of libcurl's. `permit` may be
  // empty when it throws.
  void enter_again(UniqueHttpPermit& permit, const std::string& origin,
                   const std::stop_token& stop);
  // The same, unless the place is at `origin`.
  void move(UniqueHttpPermit& permit, const std::string& origin, const std::stop_token& stop) {
    if (permit->origin() != origin) enter_again(permit, origin, stop);
  }
  // Ends connections that wait, unless others use them, and those that are busy when they come
  // back. Later requests open new ones.
  void close() noexcept;

  const unsigned most;
  const std::string key;
  ConnectionCount count;
};

}  // namespace tensorizer::io
