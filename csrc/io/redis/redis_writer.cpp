#include "io/redis/redis_writer.h"

#include <algorithm>

#include "core/error.h"
#include "core/run_units.h"

namespace tensorizer::io {
namespace {

// Records up to this size are stored with one MSET, larger ones piece by piece.
constexpr uint64_t kSmallNbytes = uint64_t{1} << 20;
constexpr uint64_t kReadNbytes = uint64_t{4} << 20;
constexpr size_t kPipelinedWrites = 1024;

std::string_view as_text(ConstBuffer bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string key_at(const RedisRecord& record, uint64_t position) {
  return record.key_stem + std::to_string(position);
}

}  // namespace

std::vector<RedisWriteJob> plan_redis_jobs(const std::vector<RedisRecord>& records) {
  std::vector<RedisWriteJob> jobs;
  for (size_t i = 0; i < records.size(); ++i) {
    const RedisRecord& record = records[i];
    if (record.header_offset >= record.data_offset || record.end() < record.data_offset)
      throw Error(Errc::invalid_argument,
                  "record " + record.key_stem + ": its header does not come before its payload");
    const bool joins = !jobs.empty() && record.nbytes() <= kSmallNbytes &&
                       records[i - 1].end() == record.header_offset &&
                       record.end() - records[jobs.back().first].header_offset <= kReadNbytes;
    if (joins)
      jobs.back().last = i + 1;
    else
      jobs.push_back({i, i + 1});
  }
  return jobs;
}

std::vector<bool> RedisWriter::exist(const std::vector<std::string>& keys,
                                     const std::stop_token& stop) {
  std::vector<bool> found;
  std::unique_ptr<RedisHandle> redis = pool_.take(stop);
  for (size_t first = 0; first < keys.size(); first += kPipelinedWrites) {
    const size_t last = std::min(keys.size(), first + kPipelinedWrites);
    for (size_t i = first; i < last; ++i) redis->append({"EXISTS", keys[i]});
    redis->flush(stop);
    for (size_t i = first; i < last; ++i) found.push_back(redis->read_reply(stop)->integer != 0);
  }
  pool_.give_back(std::move(redis));
  return found;
}

void RedisWriter::remove(const std::string& key, const std::stop_token& stop) {
  std::unique_ptr<RedisHandle> redis = pool_.take(stop);
  redis->command({"DEL", key}, stop);
  pool_.give_back(std::move(redis));
}

void RedisWriter::put(const std::string& key, ConstBuffer value, const std::stop_token& stop) {
  std::unique_ptr<RedisHandle> redis = pool_.take(stop);
  redis->begin_set(key, value.size(), stop);
  redis->send_value(value, true, stop);
  redis->flush(stop);
  redis->read_reply(stop);
  pool_.give_back(std::move(redis));
}

void RedisWriter::write(RangeSource& source, const std::vector<RedisRecord>& records,
                        const std::stop_token& stop) {
  const std::vector<RedisWriteJob> jobs = plan_redis_jobs(records);
  const SourceTraits traits = source.traits();
  const unsigned useful = traits.sequential ? 1 : std::max(1u, traits.concurrency);
  const unsigned workers = std::min(useful, std::max(1u, pool_.options().connections));
  for_each_index(jobs.size(), workers, stop, [&](size_t j, const std::stop_token& group_stop) {
    run_job(source, std::span(records).subspan(jobs[j].first, jobs[j].last - jobs[j].first),
            group_stop);
  });
}

void RedisWriter::run_job(RangeSource& source, std::span<const RedisRecord> records,
                          const std::stop_token& stop) {
  throw_if_stopped(stop);
  std::unique_ptr<RedisHandle> redis = pool_.take(stop);
  if (records.front().nbytes() > kSmallNbytes) {
    write_large(*redis, source, records.front(), stop);
    records = records.subspan(1);
  }
  if (!records.empty()) {
    std::vector<std::byte> bytes(records.back().end() - records.front().header_offset);
    source.read_at(records.front().header_offset, bytes, stop);
    write_small(*redis, records, bytes, stop);
  }
  pool_.give_back(std::move(redis));
}

void RedisWriter::write_small(RedisHandle& redis, std::span<const RedisRecord> records,
                              ConstBuffer bytes, const std::stop_token& stop) {
  const uint64_t origin = records.front().header_offset;
  for (const RedisRecord& record : records) {
    const ConstBuffer header =
        bytes.subspan(record.header_offset - origin, record.data_offset - record.header_offset);
    const ConstBuffer data = bytes.subspan(record.data_offset - origin, record.data_nbytes);
    const std::string header_key = key_at(record, record.header_offset);
    if (data.empty())
      redis.append({"SET", header_key, as_text(header)});
    else
      redis.append(
          {"MSET", key_at(record, record.data_offset), as_text(data), header_key, as_text(header)});
  }
  redis.flush(stop);
  for (size_t i = 0; i < records.size(); ++i) redis.read_reply(stop);
}

void RedisWriter::write_large(RedisHandle& redis, RangeSource& source, const RedisRecord& record,
                              const std::stop_token& stop) {
  const std::string header_key = key_at(record, record.header_offset);
  redis.append({"DEL", header_key});
  size_t replies = 1;
  const uint64_t value_nbytes =
      record.data_nbytes > limits_.max_nbytes ? limits_.split_nbytes : limits_.max_nbytes;
  std::vector<std::byte> header(record.data_offset - record.header_offset);
  std::vector<std::byte> buffer(std::min(kReadNbytes, record.data_nbytes));
  if (record.data_nbytes == 0) source.read_at(record.header_offset, header, stop);
  for (uint64_t start = 0; start < record.data_nbytes; start += value_nbytes) {
    const uint64_t end = std::min(record.data_nbytes, start + value_nbytes);
    redis.begin_set(key_at(record, record.data_offset + start), end - start, stop);
    ++replies;
    for (uint64_t at = start; at < end; at += buffer.size()) {
      const Buffer piece = Buffer(buffer).first(std::min<uint64_t>(buffer.size(), end - at));
      // The header precedes the payload and comes with its first piece, in one request to the
      // source.
      const Buffer both[] = {Buffer(header), piece};
      if (at == 0)
        source.read_at(record.header_offset, both, stop);
      else
        source.read_at(record.data_offset + at, piece, stop);
      redis.send_value(piece, at + piece.size() == end, stop);
    }
  }
  redis.flush(stop);
  for (; replies > 0; --replies) redis.read_reply(stop);
  redis.command({"SET", header_key, as_text(header)}, stop);
}

}  // namespace tensorizer::io
