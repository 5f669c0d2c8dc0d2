#include "io/http/http_source.h"

#include <algorithm>
#include <cstring>

#include "core/checked_math.h"

namespace tensorizer::io {
namespace {

// What a connection of an object store brings in the time that one more request costs.
constexpr uint64_t kGapNbytes = uint64_t{1} << 20;

}  // namespace

HttpSource::HttpSource(HttpAddress address, const HttpOptions& options, uint64_t begin,
                       std::optional<uint64_t> end)
    : client_(std::move(address), options), begin_(begin), end_(end) {}

std::shared_ptr<HttpSource> HttpSource::open(HttpAddress address, const HttpOptions& options,
                                             uint64_t begin, std::optional<uint64_t> end,
                                             const std::stop_token& stop,
                                             std::optional<ResourceIdentity> known) {
  if (end && *end <= begin)
    throw Error(Errc::invalid_argument, "the range ends at " + std::to_string(*end) +
                                            ", not after its begin " + std::to_string(begin));
  std::shared_ptr<HttpSource> source(new HttpSource(std::move(address), options, begin, end));
  source->known_ = std::move(known);
  source->open_first(stop);
  return source;
}

void HttpSource::open_first(const std::stop_token& stop) {
  auto body = std::make_unique<HttpBody>(client_);
  request_first(*body, stop);
  note_first(body->exchange());
  const Buffer head(head_);
  std::optional<HttpFailure> broke;
  try {
    // A ranged body is read to its end, so that the connection can be used again.
    const HttpPlace place(client_.places, stop);
    body->receive(begin_, std::span<const Buffer>(&head, 1), stop, has_ranges_ && !head_.empty());
  } catch (const HttpFailure& failure) {
    if (!failure.transient) throw open_error(failure, 1);
    broke = failure;
  }
  uint64_t received = body->received(begin_);
  if (!has_ranges_ && !broke) {
    if (!body->ended()) {
      MutexLock lock(sequential_mutex_);
      *sequential_ = std::move(body);
    } else if (!identity_.size) {
      note_end(begin_ + received);
      head_.resize(received);
    }
  }
  body.reset();  // the rest is another request's
  if (received == head_.size()) return;
  const Buffer last = head.subspan(received);
  const std::span<const Buffer> rest(&last, 1);
  const HttpFailure* const earlier = broke ? &*broke : nullptr;
  received += has_ranges_
                  ? fetch_range(client_, identity_, begin_ + received, rest, stop, {}, earlier)
                  : read_pass(begin_ + received, rest, stop, earlier);
  if (received < head_.size()) note_end(begin_ + received);
  head_.resize(received);
}

void HttpSource::request_first(HttpBody& body, const std::stop_token& stop) {
  uint64_t nbytes = std::max<uint64_t>(1, client_.options.head_nbytes);
  if (end_) nbytes = std::min(nbytes, *end_ - begin_);
  const RangeRequest wanted{begin_, nbytes, nullptr, false};
  HttpRequest request{.range = range_text(begin_, nbytes)};
  if (known_) request.header_lines.push_back("If-None-Match: " + *known_->etag);
  const auto accept = [&](const HttpResponse& response) { return accept_first(wanted, response); };
  const auto attempt = [&] {
    const HttpPlace place(client_.places, stop);
    for (;;) {
      try {
        return body.start(place, request, accept, stop);
      } catch (const HttpFailure& failure) {
        const bool is_range_refused =
            failure.status == 416 && begin_ == 0 && !request.range.empty();
        if ((failure.status == 412 || failure.status == 304) && known_) {
          known_.reset();  // some servers compare nothing where a range is asked for, or wrongly
          request.header_lines.clear();
        } else if (is_range_refused) {
          request.range.clear();  // some stores refuse every range of an empty object
        } else {
          throw;
        }
      }
    }
  };
  with_http_retries(
      client_.options, client_.counters, attempt, [] { return uint64_t{0}; },
      [&](const HttpFailure& failure, int tries) { return open_error(failure, tries); }, stop);
}

void HttpSource::note_first(const HttpExchange& exchange) {
  name_ = client_.endpoint.name();
  response_ = exchange.response();
  seconds_to_connect_ = exchange.time_to_connect().count();
  seconds_to_response_ = exchange.time_to_first_byte().count();
  client_.places.limit.note_first_answer(exchange.time_to_first_byte() -
                                         exchange.time_to_connect());
}

uint64_t HttpSource::accept_first(const RangeRequest& request, const HttpResponse& response) {
  if (response.status == 304 && known_) {
    const auto etag = find_field(response.headers, "etag");
    if (etag && *etag != *known_->etag) refuse(response, "its ETag is not the one asked about");
    has_ranges_ = true;
    identity_ = *known_;
    head_.clear();
    return begin_;
  }
  const CheckedResponse checked = check_response(request, response);
  has_ranges_ = checked.partial;
  identity_ = checked.identity;
  uint64_t nbytes = request.nbytes;
  if (has_ranges_) {
    nbytes = *checked.body_nbytes;
  } else if (identity_.size) {
    if (begin_ > 0 && begin_ >= *identity_.size)
      throw HttpFailure{Errc::io,
                        "the object has " + std::to_string(*identity_.size) +
                            " bytes, the range begins at " + std::to_string(begin_),
                        "", response.status};
    nbytes = std::min(nbytes, *identity_.size - begin_);
  }
  head_.resize(nbytes);
  return has_ranges_ ? begin_ : 0;
}

Error HttpSource::open_error(const HttpFailure& failure, int tries) const {
  return to_error(failure, "Failed to open stream:", client_.endpoint.name(), tries, std::nullopt);
}

void HttpSource::note_end(uint64_t end) {
  MutexLock lock(mutex_);
  if (!found_end_) found_end_ = end;
}

std::optional<uint64_t> HttpSource::size() const {
  std::optional<uint64_t> end = identity_.size;
  if (!end) {
    MutexLock lock(mutex_);
    end = found_end_;
  }
  if (end && end_) end = std::min(*end, *end_);
  return end;
}

bool HttpSource::is_in_memory() const {
  const auto end = size();
  return end && begin_ == 0 && head_.size() == *end;
}

SourceTraits HttpSource::traits() const {
  SourceTraits traits;
  traits.unit_nbytes = client_.options.unit_nbytes;
  traits.gap_nbytes = kGapNbytes;
  traits.sequential = !has_ranges_ && !is_in_memory();
  if (traits.sequential || is_in_memory()) return traits;
  traits.remote = true;
  traits.concurrency = client_.places.limit.get();
  if (const auto end = size()) {
    const uint64_t units = std::max<uint64_t>(1, ceil_div(*end, traits.unit_nbytes));
    traits.concurrency = static_cast<unsigned>(std::min<uint64_t>(traits.concurrency, units));
  }
  return traits;
}

const std::byte* HttpSource::view(uint64_t offset, uint64_t nbytes) noexcept {
  if (offset < begin_ || offset - begin_ > head_.size()) return nullptr;
  if (nbytes > head_.size() - (offset - begin_)) return nullptr;
  return head_.data() + (offset - begin_);
}

uint64_t HttpSource::bytes_read() const noexcept {
  return client_.counters.bytes.load(std::memory_order_relaxed);
}

void HttpSource::read_at(uint64_t offset, std::span<const Buffer> buffers,
                         const std::stop_token& stop) {
  const uint64_t nbytes = total_nbytes(buffers);
  const auto last = checked_add(offset, nbytes);
  const auto end = size();
  const bool fits = last && (!end || *last <= *end);
  const uint64_t got = fits ? read_with_progress(offset, buffers, stop, {}) : 0;
  if (fits && got == nbytes) return;
  throw Error(Errc::truncated,
              "Failed to read " + name_ + ": expected " + std::to_string(nbytes) +
                  " bytes at offset " + std::to_string(offset) + ", the object ends at " +
                  std::to_string(size().value_or(offset + got)),
              name_, offset);
}

uint64_t HttpSource::read_with_progress(uint64_t offset, std::span<const Buffer> buffers,
                                        const std::stop_token& stop, const Progress& progress) {
  if (closed_.load()) throw Error(Errc::invalid_argument, name_ + " is closed", name_, offset);
  uint64_t nbytes = total_nbytes(buffers);
  std::optional<uint64_t> end = size();
  if (!end) end = end_;
  if (end) nbytes = std::min(nbytes, *end - std::min(offset, *end));
  uint64_t from_head = 0;
  if (offset >= begin_ && offset - begin_ < head_.size()) {
    from_head = std::min(nbytes, head_.size() - (offset - begin_));
    ScatterCursor into(buffers);
    into.put({head_.data() + (offset - begin_), static_cast<size_t>(from_head)});
  }
  if (from_head == nbytes) return nbytes;
  const std::vector<Buffer> rest = part_of(buffers, from_head, nbytes - from_head);
  offset += from_head;
  const uint64_t received = has_ranges_
                                ? fetch_range(client_, identity_, offset, rest, stop, progress)
                                : read_pass(offset, rest, stop);
  if (from_head + received < nbytes) note_end(offset + received);
  return from_head + received;
}

uint64_t HttpSource::read_pass(uint64_t offset, std::span<const Buffer> buffers,
                               const std::stop_token& stop, const HttpFailure* earlier) {
  MutexLock lock(sequential_mutex_);
  std::unique_ptr<HttpBody>& body = *sequential_;
  if (!body) body = std::make_unique<HttpBody>(client_);
  return body->read_at(identity_, offset, buffers, stop, earlier);
}

void HttpSource::close() noexcept {
  closed_.store(true);
  close_connections();
}

void HttpSource::close_connections() noexcept {
  {
    MutexLock lock(sequential_mutex_);
    sequential_->reset();
  }
  client_.places.close();
}

}  // namespace tensorizer::io
