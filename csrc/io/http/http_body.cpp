#include "io/http/http_body.h"

#include <algorithm>
#include <string>

namespace tensorizer::io {

void HttpBody::aim(uint64_t skip, std::span<const Slice> slices) {
  skip_ = skip;
  into_ = ScatterCursor(slices);
  std::vector<std::byte> waiting;
  waiting.swap(spare_);
  if (!waiting.empty()) put(waiting);
}

void HttpBody::put(std::span<const std::byte> bytes) {
  const size_t dropped = static_cast<size_t>(std::min<uint64_t>(skip_, bytes.size()));
  skip_ -= dropped;
  bytes = bytes.subspan(dropped);
  const size_t placed = into_.put(bytes);
  position_ += dropped + placed;
  bytes = bytes.subspan(placed);
  spare_.insert(spare_.end(), bytes.begin(), bytes.end());
}

void HttpBody::close() noexcept {
  exchange_.reset();
  connection_.reset();
  skip_ = 0;
  into_ = ScatterCursor();
  spare_.clear();
  ended_ = false;
}

void HttpBody::start(HttpClient::Permit& permit, const HttpRequest& request, const Accept& accept,
                     const HttpDeadline& deadline, const std::stop_token& stop) {
  close();
  const auto accept_here = [&](const ResponseHead& head) -> BodySink* {
    position_ = accept(head);
    return this;
  };
  exchange_ = client_.start(permit, request, accept_here, deadline, stop);
  connection_ = std::move(permit.connection);
}

void HttpBody::receive(uint64_t offset, std::span<const Slice> slices, const HttpDeadline& deadline,
                       const std::stop_token& stop, bool to_end) {
  aim(offset - position_, slices);
  exchange_->resume();
  const auto is_enough = [&] { return is_satisfied() && (!to_end || !spare_.empty()); };
  if (!is_enough() && !ended_) {
    drive(connection_->carrier().curl(), stop, [&] {
      deadline.check();
      ended_ = exchange_->check();
      return ended_ || is_enough();
    });
  }
  aim(0, {});  // the caller's memory is not needed any more
  connection_->leave();
}

uint64_t HttpBody::read_at(const ResourceIdentity& known, uint64_t offset,
                           std::span<const Slice> slices, const std::stop_token& stop,
                           const HttpFailure* earlier) {
  const uint64_t nbytes = total_nbytes(slices);
  const HttpDeadline deadline(client_.options);
  uint64_t furthest = 0;
  try {
    with_retries(
        client_.options, client_.counters, deadline,
        [&] { advance(known, offset, slices, deadline, stop); },
        [&] {
          furthest = std::max(furthest, position_);
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
                       std::span<const Slice> slices, const HttpDeadline& deadline,
                       const std::stop_token& stop) {
  HttpClient::Permit permit = client_.enter(stop);
  try {
    if (!exchange_ || offset < position_) restart(permit, known, deadline, stop);
    receive(offset, slices, deadline, stop);
    if (known.size && received(offset) < total_nbytes(slices))
      throw HttpFailure{Errc::io,
                        "the body ended after " + std::to_string(position_) + " of " +
                            std::to_string(*known.size) + " bytes",
                        "", 0, true};
  } catch (const HttpFailure&) {
    close();
    throw;
  }
}

void HttpBody::restart(HttpClient::Permit& permit, const ResourceIdentity& known,
                       const HttpDeadline& deadline, const std::stop_token& stop) {
  if (!known.proves_content())
    throw HttpFailure{
        Errc::io,
        "the server knows no ranges, so reading has to begin anew, and it gives neither ETag "
        "nor date and length to prove that the object is still the same",
        "read forward only, or use a server with ranges"};
  HttpRequest request;
  if (auto line = condition_header(known)) request.header_lines.push_back(std::move(*line));
  const auto accept = [&known](const ResponseHead& head) {
    check_response(RangeRequest{0, 1, &known, true}, head);
    return uint64_t{0};
  };
  start(permit, request, accept, deadline, stop);
}

}  // namespace tensorizer::io
