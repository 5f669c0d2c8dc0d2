#include "io/http/http_sequential.h"

#include <algorithm>
#include <string>

namespace tensorizer::io {

void StreamSink::aim(uint64_t skip, std::span<const Slice> slices) {
  skip_ = skip;
  into_ = ScatterCursor(slices);
  std::vector<std::byte> waiting;
  waiting.swap(spare_);
  if (!waiting.empty()) put(waiting);
}

void StreamSink::put(std::span<const std::byte> bytes) {
  const size_t dropped = static_cast<size_t>(std::min<uint64_t>(skip_, bytes.size()));
  skip_ -= dropped;
  bytes = bytes.subspan(dropped);
  bytes = bytes.subspan(into_.put(bytes));
  spare_.insert(spare_.end(), bytes.begin(), bytes.end());
}

void SequentialBody::adopt(UniqueHttpPermit connection, std::unique_ptr<StreamSink> sink,
                           std::unique_ptr<HttpExchange> exchange, uint64_t position) {
  close();
  connection_ = std::move(connection);
  connection_->leave();
  sink_ = std::move(sink);
  exchange_ = std::move(exchange);
  position_ = position;
  ended_ = false;
}

void SequentialBody::close() noexcept {
  exchange_.reset();
  sink_.reset();
  connection_.reset();
}

uint64_t SequentialBody::read_at(const ResourceIdentity& known, uint64_t offset,
                                 std::span<const Slice> slices, const std::stop_token& stop,
                                 const HttpFailure* earlier) {
  const uint64_t nbytes = total_nbytes(slices);
  const HttpDeadline deadline(client_.options);
  uint64_t done = 0;
  uint64_t furthest = 0;
  try {
    with_retries(
        client_.options, client_.counters, deadline,
        [&] {
          HttpClient::Permit permit = client_.enter(stop);
          done = 0;  // a new pass fills the slices from their beginning
          done = advance(permit, known, offset, slices, deadline, stop);
        },
        [&] {
          furthest = std::max(furthest, position_);
          return furthest;
        },
        [&](const HttpFailure& failure, int tries) {
          HttpFailure described = failure;
          described.reason = "bytes " + std::to_string(offset) + "-" +
                             std::to_string(offset + nbytes - 1) +
                             " from a server without ranges: " + failure.reason;
          return to_error(described, "Failed to read", client_.endpoint.name(), tries, offset);
        },
        stop, earlier);
  } catch (...) {
    // The sink must forget the caller's memory.
    close();
    throw;
  }
  return done;
}

uint64_t SequentialBody::advance(HttpClient::Permit& permit, const ResourceIdentity& known,
                                 uint64_t offset, std::span<const Slice> slices,
                                 const HttpDeadline& deadline, const std::stop_token& stop) {
  const uint64_t nbytes = total_nbytes(slices);
  try {
    if (connection_ && !connection_->is_of_this_process()) close();
    if (!exchange_ || offset < position_) restart(permit, known, deadline, stop);
    sink_->aim(offset - position_, slices);
    const auto note_position = [&] {
      position_ = offset + nbytes - sink_->room() - sink_->skip_left();
    };
    exchange_->resume();
    note_position();
    if (!sink_->satisfied() && !ended_) {
      drive(connection_->carrier().curl, stop, [&] {
        note_position();
        deadline.check();
        ended_ = exchange_->check();
        return ended_ || sink_->satisfied();
      });
    }
    note_position();
    const uint64_t done = nbytes - sink_->room();
    sink_->aim(0, {});  // the caller's memory is not needed any more
    connection_->leave();
    if (done < nbytes && known.size)
      throw HttpFailure{Errc::io,
                        "the body ended after " + std::to_string(position_) + " of " +
                            std::to_string(*known.size) + " bytes",
                        "", 0, true};
    return done;
  } catch (const HttpFailure&) {
    close();
    throw;
  }
}

void SequentialBody::restart(HttpClient::Permit& permit, const ResourceIdentity& known,
                             const HttpDeadline& deadline, const std::stop_token& stop) {
  close();
  if (!known.proves_content())
    throw HttpFailure{
        Errc::io,
        "the server knows no ranges, so reading has to begin anew, and it gives neither ETag "
        "nor date and length to prove that the object is still the same",
        "read forward only, or use a server with ranges"};
  sink_ = std::make_unique<StreamSink>();
  position_ = 0;
  ended_ = false;
  std::vector<std::string> lines;
  if (auto line = condition_header(known)) lines.push_back(std::move(*line));
  const auto accept = [this, &known](const ResponseHead& head) -> BodySink* {
    const RangeRequest request{0, 1, &known, true};
    check_response(request, head);
    return sink_.get();
  };
  exchange_ = client_.start(permit, "", lines, accept, deadline, stop);
  connection_ = std::move(permit.connection);
}

}  // namespace tensorizer::io
