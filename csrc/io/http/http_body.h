// The body of one response, which is paused between reads: it opens an object, and serves all reads
// where the server knows no ranges.
//
// Reads go forward, skipping bytes that no reader asked for. A read that goes back, or finds that
// the body broke off, starts again from byte 0, but only if ETag, or date and size, prove that it
// is the same object. Confined to one thread at a time, but for the sink, which is locked.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "io/buffers.h"
#include "io/http/http_client.h"

namespace tensorizer::io {

class HttpBody final : private BodySink {
 public:
  // Judges the response; returns the byte of the object that the body begins with.
  // Throws HttpFailure to refuse it.
  using Accept = std::function<uint64_t(const HttpResponse&)>;

  explicit HttpBody(HttpClient& client) noexcept : client_(client) {}

  // Ends the body that there is and asks for another one, as HttpClient::start does.
  void start(const HttpPlace& place, const HttpRequest& request, const Accept& accept,
             const std::stop_token& stop);

  // Fills `buffers` with the bytes from `offset` on, which the body has not gone past; fewer only
  // where it ends. With `to_end` it goes on until the body has ended, or turns out to be longer.
  // Throws HttpFailure and leaves what came before.
  // REQUIRES: the caller has a place.
  void receive(uint64_t offset, std::span<const Buffer> buffers, const std::stop_token& stop,
               bool to_end = false);

  // How many of the bytes from `offset` on were received.
  uint64_t received(uint64_t offset) const {
    const uint64_t position = this->position();
    return position > offset ? position - offset : 0;
  }
  bool ended() const noexcept { return ended_; }
  const HttpExchange& exchange() const noexcept { return *exchange_; }

  // Fills `buffers` with the bytes of an object without ranges; returns how many there were: fewer
  // only where an object of unknown size ends. `known` is the object's identity. `earlier`, if not
  // null, counts as the first try.
  uint64_t read_at(const ResourceIdentity& known, uint64_t offset, std::span<const Buffer> buffers,
                   const std::stop_token& stop, const HttpFailure* earlier = nullptr);

 private:
  bool ready() const noexcept override;
  bool has_enough() const noexcept override;
  void put(std::span<const std::byte> bytes) override;
  // The next bytes: `skip` of them are dropped, the following fill `buffers`, which is borrowed.
  void set_destination(uint64_t skip, std::span<const Buffer> buffers) REQUIRES_LOCK(mutex_);
  void place(std::span<const std::byte> bytes) REQUIRES_LOCK(mutex_);
  bool is_satisfied() const noexcept REQUIRES_LOCK(mutex_) {
    return skip_ == 0 && into_.room() == 0;
  }
  bool is_enough(bool to_end) const;
  uint64_t position() const;
  void close() noexcept;
  void advance(const ResourceIdentity& known, uint64_t offset, std::span<const Buffer> buffers,
               const std::stop_token& stop);
  void restart(const HttpPlace& place, const ResourceIdentity& known, const std::stop_token& stop);

  HttpClient& client_;
  mutable Mutex mutex_;
  uint64_t skip_ GUARDED_BY(mutex_) = 0;
  ScatterCursor into_ GUARDED_BY(mutex_);
  // Came with the last bytes that had a destination; at most one piece of libcurl's.
  std::vector<std::byte> spare_ GUARDED_BY(mutex_);
  uint64_t position_ GUARDED_BY(mutex_) =
      0;  // bytes of the object that were dropped or are in place
  bool ended_ = false;
  std::unique_ptr<HttpExchange> exchange_;  // the last member: it uses the others
};

}  // namespace tensorizer::io
