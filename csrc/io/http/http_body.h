// The body of one response, which rests between reads: it opens an object, and serves all reads
// where the server knows no ranges.
//
// Reads go forward, skipping what nobody asked for. One that goes back, or finds that the body
// broke off, starts again from byte 0, but only where ETag, or date and size, prove that it is the
// same object. Confined to one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "io/http/http_client.h"
#include "io/slices.h"

namespace tensorizer::io {

class HttpBody final : private BodySink {
 public:
  // Judges the head of the response; returns the byte of the object that the body begins with.
  // Throws HttpFailure to refuse it.
  using Accept = std::function<uint64_t(const ResponseHead&)>;

  explicit HttpBody(HttpClient& client) noexcept : client_(client) {}

  // Ends the body that there is and asks for another one, as HttpClient::start does. Takes the
  // connection of `permit` when a head was accepted.
  void start(HttpClient::Permit& permit, const HttpRequest& request, const Accept& accept,
             const HttpDeadline& deadline, const std::stop_token& stop);

  // Fills `slices` with the bytes from `offset` on, which the body has not gone past; fewer only
  // where it ends. With `to_end` it goes on until the body has ended, or turns out to be longer.
  // Throws HttpFailure and leaves what came before.
  void receive(uint64_t offset, std::span<const Slice> slices, const HttpDeadline& deadline,
               const std::stop_token& stop, bool to_end = false);

  // How many of the bytes from `offset` on were received.
  uint64_t received(uint64_t offset) const noexcept {
    return position_ > offset ? position_ - offset : 0;
  }
  bool ended() const noexcept { return ended_; }
  const HttpExchange& exchange() const noexcept { return *exchange_; }

  // Fills `slices` with the bytes of an object without ranges; returns how many there were: fewer
  // only where an object of unknown size ends. `known` is the object's identity. `earlier`, if not
  // null, counts as the first try.
  uint64_t read_at(const ResourceIdentity& known, uint64_t offset, std::span<const Slice> slices,
                   const std::stop_token& stop, const HttpFailure* earlier = nullptr);

 private:
  bool ready() const noexcept override { return !is_satisfied() || spare_.empty(); }
  void put(std::span<const std::byte> bytes) override;
  // The next bytes: `skip` of them are dropped, the following fill `slices`, which is borrowed.
  void aim(uint64_t skip, std::span<const Slice> slices);
  bool is_satisfied() const noexcept { return skip_ == 0 && into_.room() == 0; }
  void close() noexcept;
  void advance(const ResourceIdentity& known, uint64_t offset, std::span<const Slice> slices,
               const HttpDeadline& deadline, const std::stop_token& stop);
  void restart(HttpClient::Permit& permit, const ResourceIdentity& known,
               const HttpDeadline& deadline, const std::stop_token& stop);

  HttpClient& client_;
  uint64_t skip_ = 0;
  ScatterCursor into_;
  // Came with the last bytes aimed at; at most one piece of libcurl's.
  std::vector<std::byte> spare_;
  uint64_t position_ = 0;  // bytes of the object that were dropped or are in place
  bool ended_ = false;
  // In this order: the exchange ends before the connection that it uses.
  UniqueHttpPermit connection_;  // without a place between reads
  std::unique_ptr<HttpExchange> exchange_;
};

}  // namespace tensorizer::io
