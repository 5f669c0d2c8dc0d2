#include "io/redis/redis_source.h"

#include <algorithm>
#include <bit>

#include "core/error.h"

namespace tensorizer::io {
namespace {

// One GETRANGE asks for this much: the server builds each reply in memory before it sends it.
constexpr uint64_t kPieceNbytes = uint64_t{1} << 20;
// Requests sent ahead of the reply that is being received.
constexpr size_t kPipelinedReads = 4;
constexpr size_t kPipelinedLengths = 1024;
constexpr std::string_view kScanCount = "4096";
// A listing that is larger than this, or goes on for longer, is not believed.
constexpr uint64_t kMaxListedNbytes = uint64_t{256} << 20;
constexpr uint64_t kMaxPages = uint64_t{1} << 24;

}  // namespace

RedisSource::RedisSource(RedisOptions options, std::string prefix, const std::stop_token& stop)
    : prefix_(std::move(prefix)),
      name_(redis_server_name(options.socket) + "/" + prefix_ +
            (options.database ? "?db=" + std::to_string(options.database) : "")),
      options_(std::move(options)) {
  open(stop);
}

// --- connections ---------------------------------------------------------------------------------

std::unique_ptr<RedisHandle> RedisSource::take(const std::stop_token& stop) {
  uint64_t closed_times = 0;
  {
    MutexLock lock(mutex_);
    while (!idle_->empty()) {
      std::unique_ptr<RedisHandle> handle = std::move(idle_->back());
      idle_->pop_back();
      if (handle->is_usable()) return handle;
    }
    closed_times = closed_times_;
  }
  auto handle = std::make_unique<RedisHandle>(options_, stop);
  handle->generation = closed_times;
  return handle;
}

// One too many, or one that was open at a close, is ended.
void RedisSource::give_back(std::unique_ptr<RedisHandle> handle) {
  MutexLock lock(mutex_);
  if (handle->generation == closed_times_ && idle_->size() < options_.connections)
    idle_->push_back(std::move(handle));
}

void RedisSource::close_connections() {
  MutexLock lock(mutex_);
  ++closed_times_;
  idle_->clear();
}

void RedisSource::with_connection(const uint64_t& received, const std::stop_token& stop,
                                  const std::function<void(RedisHandle&)>& use) {
  std::unique_ptr<RedisHandle> handle;
  uint64_t before = 0;
  const auto attempt = [&] {
    before = received;
    handle = take(stop);
    use(*handle);
    answered_.store(true, std::memory_order_relaxed);
    give_back(std::move(handle));
  };
  const auto judge = [&](const Error& error) {
    const auto* const refused = dynamic_cast<const RedisServerError*>(&error);
    const auto* const broken = dynamic_cast<const SocketError*>(&error);
    if (refused != nullptr || (handle && handle->answered()))
      answered_.store(true, std::memory_order_relaxed);
    handle.reset();
    if (broken != nullptr) {  // after one has broken, the idle ones are no better
      MutexLock lock(mutex_);
      idle_->clear();
    }
    return FailedTry{
        .progress_nbytes = received - before,
        .answered = answered_.load(std::memory_order_relaxed),
        .passing = refused != nullptr ? refused->again : broken != nullptr && broken->passing};
  };
  const auto give_up = [](const Error& error, const RetryState& state) {
    if (state.end() != RetryEnd::never_answered) throw;
    Error explained(error.code(), std::string(error.what()) + "; " + kNeverAnsweredHint,
                    error.source);
    explained.system_errno = error.system_errno;
    throw explained;
  };
  with_retries<Error>(options_.retry, stop, attempt, judge, give_up);
}

// --- opening -------------------------------------------------------------------------------------

void RedisSource::open(const std::stop_token& stop) {
  const uint64_t received = 0;
  with_connection(received, stop, [&](RedisHandle& redis) {
    std::vector<std::string> keys = list_keys(redis, stop);
    if (keys.empty())
      throw Error(Errc::not_found, name_ + ": no key begins with \"" + prefix_ + ":\"", name_);
    layout_.emplace(measure(redis, std::move(keys), stop));
  });
}

std::vector<std::string> RedisSource::list_keys(RedisHandle& redis,
                                                const std::stop_token& stop) const {
  const std::string pattern = escape_glob(prefix_) + ":*";
  std::vector<std::string> keys;
  std::string cursor = "0";
  std::string earlier;  // a cursor from before the last power of two, so that a circle meets it
  uint64_t nbytes = 0;
  for (uint64_t page = 1; page == 1 || cursor != "0"; ++page) {
    if (std::has_single_bit(page)) earlier = cursor;
    const RedisReply reply =
        redis.command({"SCAN", cursor, "MATCH", pattern, "COUNT", kScanCount}, stop);
    const auto is = [](const redisReply* part, int type) { return part->type == type; };
    if (!is(reply.get(), REDIS_REPLY_ARRAY) || reply->elements != 2 ||
        !is(reply->element[0], REDIS_REPLY_STRING) || !is(reply->element[1], REDIS_REPLY_ARRAY))
      throw Error(Errc::io, name_ + ": not an answer that Redis gives to SCAN", name_);
    cursor = text_of(*reply->element[0]);
    for (const redisReply* key : std::span(reply->element[1]->element, reply->element[1]->elements))
      nbytes += sizeof(std::string) + keys.emplace_back(text_of(*key)).size();
    if (cursor != "0" && (cursor == earlier || page == kMaxPages || nbytes > kMaxListedNbytes))
      throw Error(
          Errc::io,
          name_ + ": SCAN " +
              (cursor == earlier ? "goes in circles: not what Redis does"
                                 : "names more keys than can be believed: not ended after " +
                                       std::to_string(keys.size())),
          name_);
  }
  // SCAN may name a key twice.
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  drop_nested_models(prefix_, keys);
  return keys;
}

RedisReply RedisSource::read_length(RedisHandle& redis, const std::string& key,
                                    const std::stop_token& stop) const {
  try {
    return redis.read_reply(stop);
  } catch (const RedisServerError& error) {
    if (error.again) throw;
    throw Error(Errc::io, name_ + ": key " + key + ": " + error.what(), name_);
  }
}

std::vector<RedisValue> RedisSource::measure(RedisHandle& redis, std::vector<std::string> keys,
                                             const std::stop_token& stop) const {
  std::vector<RedisValue> values;
  values.reserve(keys.size());
  for (size_t first = 0; first < keys.size(); first += kPipelinedLengths) {
    const size_t last = std::min(keys.size(), first + kPipelinedLengths);
    for (size_t i = first; i < last; ++i) redis.append({"STRLEN", keys[i]});
    redis.flush(stop);
    for (size_t i = first; i < last; ++i) {
      const std::optional<uint64_t> position = key_position(keys[i]);
      if (!position)
        throw Error(
            Errc::malformed,
            name_ + ": key " + printable(keys[i]) + " does not end in a colon and a position",
            name_);
      const RedisReply reply = read_length(redis, keys[i], stop);
      if (reply->type != REDIS_REPLY_INTEGER || reply->integer < 0)
        throw Error(Errc::io, name_ + ": not an answer that Redis gives to STRLEN", name_);
      values.push_back({std::move(keys[i]), *position, static_cast<uint64_t>(reply->integer)});
    }
  }
  return values;
}

// --- reading -------------------------------------------------------------------------------------

SourceTraits RedisSource::traits() const {
  // Between two values there may be a hole, so bytes that were not asked for are never fetched
  // along.
  return {.concurrency = options_.connections, .gap_nbytes = 0, .remote = true};
}

void RedisSource::read_at(uint64_t offset, std::span<const Buffer> buffers,
                          const std::stop_token& stop) {
  const uint64_t wanted = total_nbytes(buffers);
  uint64_t received = 0;
  struct Counter {  // what arrived counts, also when the read fails
    ~Counter() { total.fetch_add(received, std::memory_order_relaxed); }
    std::atomic<uint64_t>& total;
    const uint64_t& received;
  } counter{bytes_read_, received};
  with_connection(received, stop, [&](RedisHandle& redis) {
    const auto pieces = layout_->pieces(name_, offset + received, wanted - received, kPieceNbytes);
    fetch(redis, pieces, ScatterCursor(buffers, received), received, stop);
  });
}

uint64_t RedisSource::read_up_to(uint64_t offset, Buffer into, const std::stop_token& stop) {
  if (offset >= end()) return 0;
  into = into.first(static_cast<size_t>(std::min<uint64_t>(into.size(), end() - offset)));
  read_at(offset, std::span<const Buffer>(&into, 1), stop);
  return into.size();
}

void RedisSource::fetch(RedisHandle& redis, std::span<const RedisPiece> pieces, ScatterCursor into,
                        uint64_t& received, const std::stop_token& stop) {
  size_t asked = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (asked == i || asked - i <= kPipelinedReads / 2) {
      for (; asked < pieces.size() && asked < i + kPipelinedReads; ++asked)
        request(redis, pieces[asked]);
      redis.flush(stop);
    }
    redis.read_value(into, pieces[i].nbytes, layout_->values()[pieces[i].value].key, received,
                     stop);
  }
}

void RedisSource::request(RedisHandle& redis, const RedisPiece& piece) const {
  const RedisValue& value = layout_->values()[piece.value];
  if (piece.nbytes == value.nbytes)
    redis.append({"GET", value.key});
  else
    redis.append({"GETRANGE", value.key, std::to_string(piece.from),
                  std::to_string(piece.from + piece.nbytes - 1)});
}

}  // namespace tensorizer::io
