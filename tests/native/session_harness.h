// Saves and loads without Python: a sink and a source in memory, tensors that know their bytes, a
// copy engine over host memory with few slots.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bytes.h"
#include "core/error.h"
#include "core/sync.h"
#include "device/copy_engine.h"
#include "format/tensor_path.h"
#include "load/concurrent_loads.h"
#include "load/load_session.h"
#include "memory_source.h"
#include "save/save_session.h"
#include "sign/authenticity.h"

namespace tensorizer::tests {

using testing::Bytes;

// Grows as it is written; fails from its `fail_at`-th write on, if asked to.
class MemorySink final : public io::RangeSink {
 public:
  const std::string& name() const noexcept override { return name_; }
  bool one_writer() const noexcept override { return takes_one_writer; }
  bool any_order() const noexcept override { return takes_one_writer; }
  using io::RangeSink::write_at;
  void write_at(uint64_t offset, std::span<const io::ConstBuffer> buffers,
                const std::stop_token& stop) override {
    throw_if_stopped(stop);
    if (before_write) before_write(offset);
    MutexLock lock(mutex_);
    if (fail_at >= 0 && writes_++ >= fail_at) throw Error(Errc::io, "the sink is full", name_);
    for (const io::ConstBuffer& buffer : buffers) {
      if (bytes.size() < offset + buffer.size()) bytes.resize(offset + buffer.size());
      if (!buffer.empty()) std::memcpy(bytes.data() + offset, buffer.data(), buffer.size());
      offset += buffer.size();
    }
  }
  bool fill_at(uint64_t offset, uint64_t nbytes, const std::function<void(io::Buffer)>& fill,
               const std::stop_token& stop) override {
    if (!lends) return false;
    write_at(offset, io::ConstBuffer{}, stop);
    MutexLock lock(mutex_);
    if (bytes.size() < offset + nbytes) bytes.resize(offset + nbytes);
    fill(std::span(bytes).subspan(offset, nbytes));
    ++filled;
    return true;
  }
  void relocate(uint64_t from, uint64_t nbytes, uint64_t to, const std::stop_token&) override {
    ++relocations;
    bytes.resize(std::max<size_t>(bytes.size(), to + nbytes));
    std::memmove(bytes.data() + to, bytes.data() + from, nbytes);
  }
  void publish(uint64_t end, const std::stop_token&) override {
    bytes.resize(end);
    published = bytes;
  }
  void finish(const std::stop_token&) override {}

  Bytes bytes;
  Bytes published;
  int fail_at = -1;
  int relocations = 0;
  bool takes_one_writer = false;               // as a local file
  bool lends = false;                          // room of its own
  int filled = 0;                              // how often
  std::function<void(uint64_t)> before_write;  // by the writing thread, with the offset

 private:
  std::string name_ = "memory";
  Mutex mutex_;
  int writes_ = 0;
};

// Reads from memory without offering a view, so that every path through read_at is taken; fails on
// demand.
class PlainSource final : public io::RangeSource {
 public:
  explicit PlainSource(const Bytes& bytes) : bytes_(bytes) {}
  const std::string& name() const noexcept override { return name_; }
  std::optional<uint64_t> size() const override { return bytes_.size(); }
  io::SourceTraits traits() const override { return settings; }
  using io::RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override {
    throw_if_stopped(stop);
    if (fail_at >= 0 && reads_.fetch_add(1) >= fail_at)
      throw Error(Errc::io, "the source broke", name_);
    if (before_read) before_read();
    if (offset + io::total_nbytes(buffers) > bytes_.size())
      io::throw_truncated(name_, offset, io::total_nbytes(buffers), bytes_.size());
    for (const io::Buffer& buffer : buffers) {
      if (!buffer.empty()) std::memcpy(buffer.data(), bytes_.data() + offset, buffer.size());
      offset += buffer.size();
    }
  }
  uint64_t bytes_read() const noexcept override { return 0; }

  io::SourceTraits settings{.concurrency = 4};
  int fail_at = -1;
  std::function<void()> before_read;  // by the reading thread

 private:
  const Bytes& bytes_;
  std::string name_ = "plain";
  std::atomic<int> reads_{0};
};

// A device whose memory is host memory; copies happen when they are asked for, buffers are few and
// shared by all copiers.
class HostEngine final : public device::CopyEngine {
 public:
  HostEngine(unsigned buffers, uint64_t nbytes)
      : buffer_nbytes_(nbytes), memory_(buffers, Bytes(nbytes)) {
    MutexLock lock(mutex_);
    for (unsigned i = 0; i < buffers; ++i) free_.push_back(i);
  }
  uint64_t buffer_nbytes() const noexcept override { return buffer_nbytes_; }
  bool is_ready() const noexcept override { return true; }
  void order_after_caller() override {}
  std::unique_ptr<device::Copier> make_copier(bool) override {
    return std::make_unique<HostCopier>(*this);
  }
  void wipe(std::span<const device::DeviceRange> destinations) noexcept override {
    for (const device::DeviceRange& range : destinations)
      std::memset(range.device_address, 0, range.nbytes);
  }
  std::function<void()> before_copy;  // by the copier's thread; may throw
  size_t free_buffers() {
    MutexLock lock(mutex_);
    return free_.size();
  }

 private:
  class HostCopier final : public device::Copier {
   public:
    explicit HostCopier(HostEngine& engine) : engine_(engine) {}
    ~HostCopier() override {
      for (const unsigned buffer : in_use_) engine_.give_back(buffer);
    }
    std::span<std::byte> try_acquire() override {
      MutexLock lock(engine_.mutex_);
      if (in_use_.size() == 3 || engine_.free_.empty()) return {};
      in_use_.push_back(engine_.free_.back());
      engine_.free_.pop_back();
      return engine_.memory_[in_use_.back()];
    }
    void wait(const std::stop_token& stop) override {
      if (in_use_.empty()) return engine_.wait_for_buffer(stop);
      const unsigned oldest = in_use_.front();
      in_use_.erase(in_use_.begin());
      Bytes& bytes = engine_.memory_[oldest];
      std::fill(bytes.begin(), bytes.end(), std::byte{0xEE});  // a buffer keeps nothing
      engine_.give_back(oldest);
    }
    bool has_in_use() const noexcept override { return !in_use_.empty(); }
    void send(std::span<const device::CopyPiece> pieces, const std::stop_token&) override {
      if (engine_.before_copy) engine_.before_copy();
      for (const device::CopyPiece& piece : pieces)
        std::memcpy(piece.device_address, bytes() + piece.buffer_offset, piece.nbytes);
    }
    void end_fetch(const std::stop_token&) override {}
    void begin_fetch(std::span<const device::CopyPiece> pieces, const std::stop_token&) override {
      if (engine_.before_copy) engine_.before_copy();
      for (const device::CopyPiece& piece : pieces)
        std::memcpy(bytes() + piece.buffer_offset, piece.device_address, piece.nbytes);
    }
    void finish(const std::stop_token&) override {}

   private:
    std::byte* bytes() { return engine_.memory_[in_use_.back()].data(); }
    HostEngine& engine_;
    std::vector<unsigned> in_use_;
  };

  void wait_for_buffer(const std::stop_token& stop) {
    MutexLock lock(mutex_);
    if (!changed_.wait(mutex_, stop, [this]() REQUIRES_LOCK(mutex_) { return !free_.empty(); }))
      throw Error(Errc::cancelled, "cancelled");
  }
  void give_back(unsigned buffer) noexcept {
    MutexLock lock(mutex_);
    free_.push_back(buffer);
    changed_.notify_all();
  }

  const uint64_t buffer_nbytes_;
  std::vector<Bytes> memory_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<unsigned> free_ GUARDED_BY(mutex_);
};

struct Tensor {
  std::string name;
  Bytes data;
};

inline std::vector<Tensor> make_tensors(const std::vector<size_t>& sizes, uint64_t seed,
                                        const std::string& stem = "t") {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < sizes.size(); ++i)
    tensors.push_back({stem + std::to_string(i), testing::random_bytes(sizes[i], seed * 1000 + i)});
  return tensors;
}

// One write call of byte tensors.
inline void write_call(save::SaveSession& session, const std::vector<Tensor>& tensors,
                       bool growing = false, device::CopyEngine* engine = nullptr,
                       const std::stop_token& stop = {}) {
  std::vector<save::TensorToWrite> plan;
  std::vector<format::TensorPath> paths;
  std::vector<device::TensorMemory> payloads;
  for (const Tensor& tensor : tensors) {
    paths.push_back({tensor.name});
    plan.push_back({.name = tensor.name,
                    .dtype = "|u1",
                    .shape = {tensor.data.size()},
                    .data_nbytes = tensor.data.size()});
    payloads.push_back({const_cast<std::byte*>(tensor.data.data()), tensor.data.size(), nullptr});
  }
  session.begin_call(std::move(plan), paths, {}, growing, stop);
  try {
    session.write_payloads(payloads, engine, stop);
    session.finish_call(stop);
  } catch (...) {
    session.abort_call();
    throw;
  }
}

inline Bytes save_all(const std::vector<Tensor>& tensors, const save::SaveOptions& options = {},
                      device::CopyEngine* engine = nullptr) {
  auto sink = std::make_shared<MemorySink>();
  save::SaveSession session(sink, 0, options);
  write_call(session, tensors, false, engine);
  session.finish({});
  return sink->published;
}

struct LoadSettings {
  bool verify = true;
  unsigned workers = 0;
  std::shared_ptr<load::KeyRing> keys;
  device::CopyEngine* engine = nullptr;
  std::shared_ptr<load::KeyRing> opening_keys{};  // set: others than those of the tensors
};

// Without keys: a file in clear.
inline std::shared_ptr<const load::OpenedIndex> open_all(io::RangeSource& source,
                                                         load::KeyRing* keys = nullptr,
                                                         const std::stop_token& stop = {}) {
  const auto key = keys != nullptr ? format::KeyGiven::yes : format::KeyGiven::no;
  const auto opened = load::open_index(source, load::open_head(source, 0, key, stop), stop);
  if (keys != nullptr) sign::check_tag(*opened, *keys);
  return opened;
}

inline void run_load(load::LoadSession& session, const std::stop_token& stop = {}) {
  load::LoadSession* const alone = &session;
  load::run_loads({&alone, 1}, 1, {}, stop);
}

// Loads every entry to memory of its own; the buffers are returned even when the load throws
// (through `into`). True when the session promised to be brief.
inline bool load_all(io::RangeSource& source, const LoadSettings& settings,
                     std::vector<Bytes>& into, const std::stop_token& stop = {}) {
  const auto opened =
      open_all(source, (settings.opening_keys ? settings.opening_keys : settings.keys).get(), stop);
  std::vector<load::LoadTarget> targets;
  into.clear();
  for (const format::IndexEntry& entry : opened->index.entries())
    into.emplace_back(entry.data_nbytes);
  for (uint32_t i = 0; i < opened->index.size(); ++i) {
    targets.push_back({.entry = i, .destination = {into[i].data(), into[i].size(), nullptr}});
  }
  load::LoadSession session(source, opened, targets,
                            {.verify = settings.verify,
                             .max_workers = settings.workers,
                             .keys = settings.keys.get(),
                             .engine = settings.engine});
  run_load(session, stop);
  return session.is_brief;
}

// Loads random boxes of every entry, each to memory of its own, and compares them with the tensors,
// which are bytes seen as rows of `width`.
inline void load_parts(io::RangeSource& source, const std::vector<Tensor>& tensors,
                       const LoadSettings& settings, uint32_t seed,
                       const std::stop_token& stop = {}) {
  constexpr size_t kPartsOfEach = 3;
  std::mt19937 random(seed);
  const auto below = [&](uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(random);
  };
  const auto opened = open_all(source, settings.keys.get(), stop);
  std::vector<load::LoadTarget> targets;
  std::vector<Bytes> found, wanted;
  for (uint32_t entry = 0; entry < tensors.size(); ++entry) {
    const Bytes& data = tensors[entry].data;
    for (size_t i = 0; i < kPartsOfEach && !data.empty(); ++i) {
      const uint64_t width = 1 + data.size() / 20'000 + below(3) * below(2000);
      const uint64_t height = std::max<uint64_t>(1, data.size() / width);
      const std::array<uint64_t, 2> shape{height, std::min<uint64_t>(width, data.size())};
      std::array<load::SliceDim, 2> box;
      for (size_t d = 0; d < 2; ++d) {
        const uint64_t start = below(shape[d]), step = d == 0 ? 1 + below(3) : 1;
        box[d] = {start, below((shape[d] - start - 1) / step + 1) + 1, step};
      }
      targets.push_back({.entry = entry, .runs = load::runs_of(shape, 1, box)});
      wanted.emplace_back();
      for (uint64_t row = 0; row < box[0].count; ++row) {
        const auto from =
            data.begin() + (box[0].start + row * box[0].stride) * shape[1] + box[1].start;
        wanted.back().insert(wanted.back().end(), from, from + box[1].count);
      }
      found.emplace_back(wanted.back().size(), std::byte{0xAB});
    }
  }
  std::shuffle(targets.begin(), targets.end(), std::mt19937(seed));
  std::shuffle(wanted.begin(), wanted.end(), std::mt19937(seed));
  std::shuffle(found.begin(), found.end(), std::mt19937(seed));
  for (size_t i = 0; i < targets.size(); ++i)
    targets[i].destination = {found[i].data(), found[i].size(), nullptr};
  load::LoadSession session(source, opened, targets,
                            {.max_workers = settings.workers,
                             .keys = settings.keys.get(),
                             .engine = settings.engine,
                             .parts = true});
  run_load(session, stop);
  for (size_t i = 0; i < targets.size(); ++i) EXPECT_TRUE(testing::same(found[i], wanted[i])) << i;
}

inline void expect_loads(const Bytes& file, const std::vector<Tensor>& tensors,
                         const LoadSettings& settings = {}) {
  PlainSource source(file);
  std::vector<Bytes> found;
  ASSERT_NO_THROW(load_all(source, settings, found));
  ASSERT_EQ(found.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(testing::same(found[i], tensors[i].data)) << tensors[i].name;
}

inline std::shared_ptr<crypto::SecretKey> test_key(unsigned char fill = 7) {
  const std::array<std::byte, crypto::kKeyNbytes> bytes = [&] {
    std::array<std::byte, crypto::kKeyNbytes> key;
    key.fill(std::byte{fill});
    return key;
  }();
  return std::make_shared<crypto::SecretKey>(bytes);
}

}  // namespace tensorizer::tests
