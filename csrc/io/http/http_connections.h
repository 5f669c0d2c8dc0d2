// Connections to the hosts of this process: how many requests a host gets at the same time, and the
// lanes that wait with their connections open. All sources and uploads of a process share them.
#pragma once

#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "core/sync.h"
#include "io/curl/curl_handle.h"

namespace tensorizer::io {

// One origin (scheme, host, port), for all who use it. Internally locked.
class HostConnections {
 public:
  // Those of the calling process to `origin`.
  static std::shared_ptr<HostConnections> of(const std::string& origin);

  HostConnections();
  HostConnections(const HostConnections&) = delete;
  HostConnections& operator=(const HostConnections&) = delete;

  // Waits until fewer than `limit` requests run; throws Errc::cancelled on a stop.
  void enter(unsigned limit, const std::stop_token& stop);
  void leave() noexcept;
  bool has_place(unsigned limit) const;

  // A lane that waits under `key` (what its connections may be used for), or a new one. One that
  // waits under another key makes room where there would be more than `limit`.
  std::unique_ptr<CurlLane> take(const std::string& key, unsigned limit);
  // Keeps the lane while anybody uses this origin, else ends its connections.
  void give_back(const std::string& key, std::unique_ptr<CurlLane> lane) noexcept;

  void add_user();
  // The last one ends all connections that wait.
  void remove_user() noexcept;

  bool belongs_to_this_process() const noexcept;

 private:
  struct Waiting {
    std::string key;
    std::unique_ptr<CurlLane> lane;
  };

  const pid_t process_;
  mutable Mutex mutex_;
  CondVar left_;
  unsigned running_ GUARDED_BY(mutex_) = 0;
  unsigned users_ GUARDED_BY(mutex_) = 0;
  std::vector<Waiting> waiting_ GUARDED_BY(mutex_);
};

// What one source or uploader has of them. Safe from many threads.
class HttpConnections {
 public:
  // `limit`: requests at the same time to one host, those of everybody else included. `key`: what
  // connections may be shared with, beyond what libcurl compares itself.
  HttpConnections(unsigned limit, std::string key) : limit_(limit), key_(std::move(key)) {}
  ~HttpConnections() { close(); }
  HttpConnections(const HttpConnections&) = delete;
  HttpConnections& operator=(const HttpConnections&) = delete;

  // A lane; gives itself back.
  class Lease {
   public:
    Lease() = default;
    Lease(std::shared_ptr<HostConnections> host, std::string key, unsigned limit)
        : host_(std::move(host)), key_(std::move(key)), lane_(host_->take(key_, limit)) {}
    Lease(Lease&&) = default;
    Lease& operator=(Lease&& other) noexcept {
      std::swap(host_, other.host_);
      std::swap(key_, other.key_);
      std::swap(lane_, other.lane_);
      return *this;
    }
    ~Lease() {
      if (lane_) host_->give_back(key_, std::move(lane_));
    }
    CurlLane& operator*() const noexcept { return *lane_; }
    CurlLane* operator->() const noexcept { return lane_.get(); }
    explicit operator bool() const noexcept { return lane_ != nullptr; }

   private:
    std::shared_ptr<HostConnections> host_;
    std::string key_;
    std::unique_ptr<CurlLane> lane_;
  };

  // Permission for one request at a time.
  class Ticket {
   public:
    explicit Ticket(std::shared_ptr<HostConnections> host) noexcept : host_(std::move(host)) {}
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() { host_->leave(); }

   private:
    std::shared_ptr<HostConnections> host_;
  };

  Ticket enter(const std::string& origin, const std::stop_token& stop);
  Lease take(const std::string& origin);
  // True when `origin` would take one more request at once.
  bool has_place(const std::string& origin);

  // Ends connections that wait, unless others use them, and those that are busy when they come
  // back. Later requests open new ones.
  void close() noexcept;

 private:
  std::shared_ptr<HostConnections> host(const std::string& origin);

  const unsigned limit_;
  const std::string key_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<HostConnections>> hosts_ GUARDED_BY(mutex_);
};

}  // namespace tensorizer::io
