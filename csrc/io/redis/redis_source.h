// A file stored in Redis as strings (docs/format.md, section 8), read by pipelined GET and GETRANGE
// on several connections. Safe from many threads: each read takes an idle connection or a new one.
//
// A connection that breaks in the middle of a read is replaced and the read goes on at the byte
// where it stopped, within RedisOptions::retry. Nothing protects against a key that is overwritten,
// with a value of the same length, while a load runs: Redis has no versions.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/sync.h"
#include "io/range_source.h"
#include "io/redis/redis_handle.h"
#include "io/redis/redis_layout.h"

namespace tensorizer::io {

class RedisSource final : public RangeSource {
 public:
  // Lists the keys below `prefix` and their lengths.
  // Throws Errc::not_found where there is none, Errc::malformed for a key that does not end in a
  // position, Errc::io.
  RedisSource(RedisOptions options, std::string prefix, const std::stop_token& stop);

  const std::string& name() const noexcept override { return name_; }
  // Unknown: a file that was stored with a filter lacks records, also at its end, and loads of what
  // is there must go on working.
  std::optional<uint64_t> size() const override { return std::nullopt; }
  SourceTraits traits() const override;
  void read_at(uint64_t offset, std::span<const Buffer> buffers,
               const std::stop_token& stop) override;
  using RangeSource::read_at;
  // Throws Errc::malformed where a hole lies in between.
  uint64_t read_up_to(uint64_t offset, Buffer into, const std::stop_token& stop) override;
  uint64_t bytes_read() const noexcept override {
    return bytes_read_.load(std::memory_order_relaxed);
  }

  // Ends idle connections now and the others after their read; later reads open new ones.
  void close_connections();
  void close() noexcept override { close_connections(); }

  // End of the last value.
  uint64_t end() const noexcept { return layout_->end(); }

  // End of the bytes that follow `offset` without a hole.
  uint64_t contiguous_end(uint64_t offset) const { return layout_->contiguous_end(offset); }

 private:
  // Calls use(connection), again with another one where one broke or the server asked for patience,
  // as RedisOptions::retry has it. `received` counts the bytes that use() has brought.
  void with_connection(const uint64_t& received, const std::stop_token& stop,
                       const std::function<void(RedisHandle&)>& use);
  std::unique_ptr<RedisHandle> take(const std::stop_token& stop);
  void give_back(std::unique_ptr<RedisHandle> handle);

  std::vector<std::string> list_keys(RedisHandle& redis, const std::stop_token& stop) const;
  std::vector<RedisValue> measure(RedisHandle& redis, std::vector<std::string> keys,
                                  const std::stop_token& stop) const;
  RedisReply read_length(RedisHandle& redis, const std::string& key,
                         const std::stop_token& stop) const;
  void open(const std::stop_token& stop);
  void fetch(RedisHandle& redis, std::span<const RedisPiece> pieces, ScatterCursor into,
             uint64_t& received, const std::stop_token& stop);
  void request(RedisHandle& redis, const RedisPiece& piece) const;

  std::string prefix_;
  std::string name_;
  std::optional<RedisLayout> layout_;  // set by the constructor
  std::atomic<uint64_t> bytes_read_{0};
  const RedisOptions options_;
  std::atomic<bool> answered_{false};  // the server has, at least once
  Mutex mutex_;
  // Idle connections. Those made before a fork are left to the parent.
  FreshInChild<std::vector<std::unique_ptr<RedisHandle>>> idle_ GUARDED_BY(mutex_);
  uint64_t closed_times_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tensorizer::io
