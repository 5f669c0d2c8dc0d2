// Stores records of a source as Redis strings (docs/format.md, section 8), several at a time and in
// bounded memory: a large value is sent while it is read. Confined to one thread; write() uses
// threads of its own.
//
// Writes are not tried again: an export that failed is resumed by running it again, which skips
// what is complete.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/range_source.h"
#include "io/redis/redis_pool.h"

namespace tensorizer::io {

// One record: its header and its payload, adjacent in the file.
struct RedisRecord {
  std::string key_stem;  // "<prefix>:<stored name>:"; a position is appended
  uint64_t header_offset = 0;
  uint64_t data_offset = 0;
  uint64_t data_nbytes = 0;

  uint64_t end() const noexcept { return data_offset + data_nbytes; }
  uint64_t nbytes() const noexcept { return end() - header_offset; }
};

// Records [first, last) that are read at once, or one large record alone.
struct RedisWriteJob {
  size_t first = 0;
  size_t last = 0;
};

// Pure. Throws Errc::invalid_argument for a record whose positions are not in order.
std::vector<RedisWriteJob> plan_redis_jobs(const std::vector<RedisRecord>& records);

// A payload above `max_nbytes` becomes several values of `split_nbytes`, which readers of the
// layout join again. The server's default limit is 512 MiB (proto-max-bulk-len).
struct RedisValueLimits {
  uint64_t max_nbytes = uint64_t{512} << 20;
  uint64_t split_nbytes = uint64_t{256} << 20;
};

class RedisWriter {
 public:
  explicit RedisWriter(RedisOptions options, RedisValueLimits limits = {})
      : limits_(limits), pool_(std::move(options)) {}

  // Which keys exist on the server, in order.
  std::vector<bool> exist(const std::vector<std::string>& keys, const std::stop_token& stop);

  void remove(const std::string& key, const std::stop_token& stop);
  void put(const std::string& key, ConstBuffer value, const std::stop_token& stop);

  // Writes the records. A record's header key never stands beside a payload that is not its own: it
  // is stored with it or after it, so that its existence vouches for the payload. Returns when all
  // are stored, or throws with no thread left behind. Payloads without a byte get no key, whose
  // position would be that of the next header.
  void write(RangeSource& source, const std::vector<RedisRecord>& records,
             const std::stop_token& stop);

 private:
  void run_job(RangeSource& source, std::span<const RedisRecord> records,
               const std::stop_token& stop);
  void write_small(RedisHandle& redis, std::span<const RedisRecord> records, ConstBuffer bytes,
                   const std::stop_token& stop);
  void write_large(RedisHandle& redis, RangeSource& source, const RedisRecord& record,
                   const std::stop_token& stop);

  const RedisValueLimits limits_;
  RedisPool pool_;
};

}  // namespace tensorizer::io
