#include "io/http/http_body.h"

#include <algorithm>
#include <string>

namespace tensorizer::io {

void HttpBody::set_destination(uint64_t skip, std::span<const Buffer> buffers) {
  skip_ = skip;
  into_ = ScatterCursor(buffers);
  std::vector<std::byte> waiting;
  waiting.swap(spare_);
  place(waiting);
}

void HttpBody::place(std::span<const std::byte> bytes) {
  const size_t dropped = static_cast<size_t>(std::min<uint64_t>(skip_, bytes.size()));
  skip_ -= dropped;
  bytes = bytes.subspan(dropped);
  const size_t placed = into_.put(bytes);
  position_ += dropped + placed;
  bytes = bytes.subspan(placed);
  spare_.insert(spare_.end(), bytes.begin(), bytes.end());
}

bool HttpBody::ready() const noexcept {
  MutexLock lock(mutex_);
  return !is_satisfied() || spare_.empty();
}

bool HttpBody::has_enough() const noexcept {
  MutexLock lock(mutex_);
  return is_satisfied();
}

void HttpBody::put(std::span<const std::byte> bytes) {
  MutexLock lock(mutex_);
  place(bytes);
}

bool HttpBody::is_enough(bool to_end) const {
  MutexLock lock(mutex_);
  return is_satisfied() && (!to_end || !spare_.empty());
}

uint64_t HttpBody::position() const {
  MutexLock lock(mutex_);
  return position_;
}

void HttpBody::close() noexcept {
  exchange_.reset();
  MutexLock lock(mutex_);
  skip_ = 0;
  into_ = ScatterCursor();
  spare_.clear();
  ended_ = false;
}

void HttpBody::start(const HttpPlace& place, const HttpRequest& request, const Accept& accept,
                     const std::stop_token& stop) {
  close();
  const auto accept_here = [this, &accept](const HttpResponse& response) -> BodySink* {
    const uint64_t begin = accept(response);
    MutexLock lock(mutex_);
    position_ = begin;
    return this;
  };
  exchange_ = client_.start(place, request, accept_here, stop);
}

void HttpBody::receive(uint64_t offset, std::span<const Buffer> buffers,
                       const std::stop_token& stop, bool to_end) {
  {
    MutexLock lock(mutex_);
    set_destination(offset - position_, buffers);
  }
  const auto enough = [&] { return is_enough(to_end); };
  if (!enough() && !ended_) {
    exchange_->resume();
    ended_ = exchange_->wait_for_body(stop, enough, {});
  }
  MutexLock lock(mutex_);
  set_destination(0, {});  // the caller's memory is not needed any more
}

uint64_t HttpBody::read_at(const ResourceIdentity& known, uint64_t offset,
                           std::span<const Buffer> buffers, const std::stop_token& stop,
                           const HttpFailure* earlier) {
  const uint64_t nbytes = total_nbytes(buffers);
  uint64_t furthest = 0;
  try {
    with_http_retries(
        client_.options, client_.counters, [&] { advance(known, offset, buffers, stop); },
        [&] {
          furthest = std::max(furthest, position());
          return furthest;
        },
        [&](const HttpFailure& failure, int tries) {
          HttpFailure described = failure;
          described.reason = "bytes " + range_text(offset, nbytes) +
                             " from a server without ranges: " + failure.reason;
          return to_error(described, "Failed to read", client_.endpoint.name(), tries, offset);
        },
        stop, earlier);
  } catch (...) {
    close();  // forgets the caller's memory
    throw;
  }
  return received(offset);
}

void HttpBody::advance(const ResourceIdentity& known, uint64_t offset,
                       std::span<const Buffer> buffers, const std::stop_token& stop) {
  const HttpPlace place(client_.places, stop);
  try {
    if (!exchange_ || offset < position()) restart(place, known, stop);
    receive(offset, buffers, stop);
    if (known.size && received(offset) < total_nbytes(buffers))
      throw HttpFailure{Errc::io,
                        "the body ended after " + std::to_string(position()) + " of " +
                            std::to_string(*known.size) + " bytes",
                        "", 0, true};
  } catch (const HttpFailure&) {
    close();
    throw;
  }
}

void HttpBody::restart(const HttpPlace& place, const ResourceIdentity& known,
                       const std::stop_token& stop) {
  if (!known.proves_content())
    throw HttpFailure{
        Errc::io,
        "the server knows no ranges, so reading has to begin anew, and it gives neither ETag "
        "nor date and length to prove that the object is still the same",
        "read forward only, or use a server with ranges"};
  HttpRequest request;
  if (auto line = condition_header(known)) request.header_lines.push_back(std::move(*line));
  const auto accept = [&known](const HttpResponse& response) {
    check_response(RangeRequest{0, 1, &known, true}, response);
    return uint64_t{0};
  };
  start(place, request, accept, stop);
}

}  // namespace tensorizer::io
