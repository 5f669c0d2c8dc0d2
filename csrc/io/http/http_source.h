// An object behind http(s)://, read by ranges over several connections, or in one pass where the
// server knows no ranges.
//
// The request that opens it asks for its head, the first HttpOptions::head_nbytes bytes, and keeps
// it: reads inside are served from memory. What the response says about size, ETag and date is held
// against every later response, so the bytes of two versions never mix. Safe from many threads;
// without ranges they take turns.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/http/http_body.h"
#include "io/http/http_client.h"
#include "io/http/http_range_fetch.h"
#include "io/range_source.h"

namespace tensorizer::io {

class HttpSource final : public RangeSource {
 public:
  // Sends the first request, for the bytes from `begin` on, and returns when they are in. With
  // `end`, the object is treated as if it ended there. Throws Error: io, not_found,
  // invalid_argument, cancelled.
  //
  // With `known`, which has a strong ETag and a size, no bytes come where the object is still that
  // one: is_known() is true then.
  static std::shared_ptr<HttpSource> open(HttpAddress address, const HttpOptions& options,
                                          uint64_t begin, std::optional<uint64_t> end,
                                          const std::stop_token& stop,
                                          std::optional<ResourceIdentity> known = std::nullopt);

  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override;
  SourceTraits traits() const override;
  using RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const Buffer> buffers,
               const std::stop_token& stop) override;
  uint64_t read_with_progress(uint64_t offset, std::span<const Buffer> buffers,
                              const std::stop_token& stop, const Progress& progress) override;
  const std::byte* view(uint64_t offset, uint64_t nbytes) noexcept override;
  uint64_t bytes_read() const noexcept override;
  uint64_t read_up_to(uint64_t offset, Buffer into, const std::stop_token& stop) override {
    return read_with_progress(offset, std::span<const Buffer>(&into, 1), stop, {});
  }
  void close() noexcept override;

  // Connections at the same time from now on; bounded by HttpOptions::max_connections.
  void fix_connections(unsigned connections) { client_.places.limit.fix(connections); }
  // Ends idle connections now, unless other sources use them, and the others after their request;
  // later reads open new ones.
  void close_connections() noexcept;

  bool is_known() const noexcept { return response_.status == 304; }
  // Of the response that opened the object.
  const HttpResponse& response() const noexcept { return response_; }
  double seconds_to_connect() const noexcept { return seconds_to_connect_; }
  double seconds_to_response() const noexcept { return seconds_to_response_; }

  uint64_t requests() const noexcept { return client_.counters.requests.load(); }
  uint64_t connections() const noexcept { return client_.counters.connections.load(); }

 private:
  HttpSource(HttpAddress address, const HttpOptions& options, uint64_t begin,
             std::optional<uint64_t> end);

  void open_first(const std::stop_token& stop);
  // Returns when a response was accepted; `body` has the body.
  void request_first(HttpBody& body, const std::stop_token& stop);
  uint64_t accept_first(const RangeRequest& request, const HttpResponse& response);
  void note_first(const HttpExchange& exchange);
  Error open_error(const HttpFailure& failure, int tries) const;
  // Whether no read can need the server any more.
  bool is_in_memory() const;
  // Reads the one body of a server without ranges, on to `offset` and the bytes behind it; returns
  // how many these were, fewer only where an object of unknown size ends. `earlier`, if not null,
  // counts as the first try.
  uint64_t read_pass(uint64_t offset, std::span<const Buffer> buffers, const std::stop_token& stop,
                     const HttpFailure* earlier = nullptr);
  void note_end(uint64_t end);

  HttpClient client_;
  std::string name_;
  const uint64_t begin_;
  const std::optional<uint64_t> end_;

  // Written while opening, read-only afterwards.
  std::vector<std::byte> head_;            // the bytes [begin_, begin_ + head_.size())
  std::optional<ResourceIdentity> known_;  // to the opener; until a server refuses to compare
  ResourceIdentity identity_;
  HttpResponse response_;
  bool has_ranges_ = true;
  double seconds_to_connect_ = 0;
  double seconds_to_response_ = 0;

  std::atomic<bool> closed_{false};
  mutable Mutex mutex_;
  std::optional<uint64_t> found_end_ GUARDED_BY(mutex_);  // of an object of unknown size
  Mutex sequential_mutex_;
  // nullptr: none was needed yet, or its connection was closed. A forked child leaves the body to
  // its parent and starts one of its own.
  FreshInChild<std::unique_ptr<HttpBody>> sequential_ GUARDED_BY(sequential_mutex_);
};

}  // namespace tensorizer::io
