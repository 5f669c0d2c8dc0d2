// One pass over an object whose server knows no ranges: a body that rests between reads.
//
// Reads go forward, skipping what nobody asked for. A read that goes back, or a body that breaks
// off, starts again from byte 0, but only where ETag, or date and size, prove that it is the same
// object. A child that was forked leaves the body to its parent and starts one of its own. Confined
// to one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "io/http/http_client.h"
#include "io/slices.h"

namespace tensorizer::io {

// Gives the body to the place where it is aimed at, and holds the transfer when that is full.
class StreamSink final : public BodySink {
 public:
  // The next bytes: `skip` of them are dropped, the following fill `slices`, which is borrowed.
  void aim(uint64_t skip, std::span<const Slice> slices);
  // True when everything aimed at has arrived.
  bool satisfied() const noexcept { return skip_ == 0 && into_.room() == 0; }
  uint64_t skip_left() const noexcept { return skip_; }
  uint64_t room() const noexcept { return into_.room(); }

  bool ready() const noexcept override { return !satisfied() || spare_.empty(); }
  void put(std::span<const std::byte> bytes) override;

 private:
  uint64_t skip_ = 0;
  ScatterCursor into_;
  std::vector<std::byte>
      spare_;  // came with the last bytes aimed at; at most one piece of libcurl's
};

class SequentialBody {
 public:
  explicit SequentialBody(HttpClient& client) noexcept : client_(client) {}

  // Goes on with the body of the request that opened the object, `position` bytes of which were
  // taken.
  void adopt(UniqueHttpPermit connection, std::unique_ptr<StreamSink> sink,
             std::unique_ptr<HttpExchange> exchange, uint64_t position);

  // Fills `slices` with the bytes from `offset` on; returns how many there were: fewer only where
  // an object of unknown size ends. `known` is the object's identity.
  // `earlier`, if not null, counts as the first try.
  uint64_t read_at(const ResourceIdentity& known, uint64_t offset, std::span<const Slice> slices,
                   const std::stop_token& stop, const HttpFailure* earlier = nullptr);

  // Ends the transfer; a later read starts a new one.
  void close() noexcept;

 private:
  uint64_t advance(HttpClient::Permit& permit, const ResourceIdentity& known, uint64_t offset,
                   std::span<const Slice> slices, const HttpDeadline& deadline,
                   const std::stop_token& stop);
  void restart(HttpClient::Permit& permit, const ResourceIdentity& known,
               const HttpDeadline& deadline, const std::stop_token& stop);

  HttpClient& client_;
  // In this order: the exchange ends before the sink and the connection that it uses.
  UniqueHttpPermit connection_;  // without a place between reads
  std::unique_ptr<StreamSink> sink_;
  std::unique_ptr<HttpExchange> exchange_;
  uint64_t position_ = 0;  // bytes of the object that left the sink
  bool ended_ = false;
};

}  // namespace tensorizer::io
