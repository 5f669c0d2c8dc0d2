#include "device/cuda/kernel_module.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda/kernels/convert.h"
#include "device/cuda/kernels/secretbox.h"

namespace tensorizer::device::cuda {
namespace {

// Written by the build from kernels.ptx.
constexpr char kText[] =
#include "kernels_ptx.inc"
    ;

constexpr uint64_t kLeastChunkNbytes = 64 * 1024;
constexpr uint64_t kLeastElementNbytes = 2;

bool has_functions(const Driver& driver) noexcept {
  return driver.cuModuleLoadData && driver.cuModuleGetFunction && driver.cuModuleUnload &&
         driver.cuLaunchKernel && driver.cuMemAlloc && driver.cuMemFree;
}

}  // namespace

// --- what the self-test has shown ----------------------------------------------------------------

std::optional<std::string> SelfTestRecord::wrong() const {
  MutexLock lock(mutex_);
  return wrong_;
}

void SelfTestRecord::note(std::optional<std::string> wrong) {
  MutexLock lock(mutex_);
  wrong_ = std::move(wrong);
}

// --- the module and its memory -------------------------------------------------------------------

Kernels::Area Kernels::area(unsigned buffer) const noexcept {
  Area area = layout();
  const size_t at = buffer * stride();
  area.host = static_cast<std::byte*>(host_) + at;
  area.device = device_ + at;
  return area;
}

void Kernels::load() {
  check(driver_, driver_.cuModuleLoadData(&module_, kText), "loading the kernels");
  const auto find = [&](Function& function, const char* name) {
    check(driver_, driver_.cuModuleGetFunction(&function, module_, name), "loading the kernels");
  };
  find(mac_, "tz_mac");
  find(open_, "tz_open");
  find(convert_, "tz_convert");
}

void Kernels::reserve() {
  const size_t nbytes = buffers_ * stride();
  check(driver_, driver_.cuMemHostAlloc(&host_, nbytes, kHostAllocPortable),
        "pinning memory for the kernels");
  ::madvise(host_, nbytes, MADV_DONTDUMP);
  ::memset(host_, 0, nbytes);
  check(driver_, driver_.cuMemAlloc(&device_, nbytes), "allocating memory for the kernels");
}

void Kernels::release() noexcept {
  if (device_) static_cast<void>(driver_.cuMemFree(device_));
  if (host_) static_cast<void>(driver_.cuMemFreeHost(host_));
  if (module_) static_cast<void>(driver_.cuModuleUnload(module_));
}

Kernels::~Kernels() { release(); }

// --- what is enqueued for a buffer ---------------------------------------------------------------

std::span<ChunkToOpen> Kernels::chunks(unsigned buffer) const noexcept {
  return {area(buffer).chunks(), room_};
}

std::span<PieceToConvert> Kernels::conversions(unsigned buffer) const noexcept {
  const Area area = this->area(buffer);
  return {reinterpret_cast<PieceToConvert*>(area.host + area.conversions_at()), area.conversions};
}

void Kernels::launch(Function function, unsigned blocks, Stream stream, void** parameters) const {
  check(driver_,
        driver_.cuLaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters,
                               nullptr),
        "starting a kernel");
}

// Calls enqueue(), and zeroes the stretch of an area on the device behind it, where that fails too.
template <class Fn>
void Kernels::enqueue_and_clear(Stream stream, DevicePointer from, size_t nbytes,
                                Fn&& enqueue) const {
  try {
    enqueue();
  } catch (...) {
    static_cast<void>(driver_.cuMemsetD8Async(from, 0, nbytes, stream));
    throw;
  }
  check(driver_, driver_.cuMemsetD8Async(from, 0, nbytes, stream),
        "wiping memory of the CUDA device");
}

void Kernels::enqueue(Stream stream, unsigned buffer, const WorkOnDevice& work,
                      const CopyWithTables& copy) const {
  const Area area = this->area(buffer);
  std::vector<Copy> tables;
  uint32_t segments = 0, blocks = 0;
  if (work.chunks > 0) {
    segments = number_segments(area, work.chunks);
    tables.push_back(chunk_table(area, work.chunks, segments));
  }
  if (work.conversions > 0) blocks = number_blocks(buffer, work.conversions);
  if (blocks > 0)
    tables.push_back({area.host + area.conversions_at(), area.device + area.conversions_at(),
                      work.conversions * sizeof(PieceToConvert) + blocks * sizeof(uint32_t)});
  if (tables.empty()) return copy({});
  const size_t from = work.chunks > 0 ? 0 : area.conversions_at();
  const size_t to = area.conversions_at() + (blocks > 0 ? tables.back().nbytes : 0);
  enqueue_and_clear(stream, area.device + from, to - from, [&] {
    copy(tables);
    if (segments > 0) enqueue_open(stream, area, work.chunks, segments);
    if (blocks > 0) enqueue_convert(stream, area, work.conversions, blocks);
  });
}

// --- opening chunks ------------------------------------------------------------------------------

// Fills in which segments are whose; how many there are.
uint32_t Kernels::number_segments(const Area& area, size_t count) {
  ChunkToOpen* const chunks = area.chunks();
  auto* const chunk_of = reinterpret_cast<uint32_t*>(area.host + count * sizeof(ChunkToOpen));
  uint32_t segments = 0;
  for (size_t i = 0; i < count; ++i) {
    if (chunks[i].segments > area.room - segments)
      throw Error(Errc::invalid_argument, "more encrypted chunks than a staging buffer holds");
    chunks[i].first_segment = segments;
    std::fill_n(chunk_of + segments, chunks[i].segments, static_cast<uint32_t>(i));
    segments += chunks[i].segments;
  }
  std::fill_n(area.verdicts(), count, uint32_t{kVerdictMissing});
  return segments;
}

Copy Kernels::chunk_table(const Area& area, size_t count, uint32_t segments) noexcept {
  return {area.host, area.device, count * sizeof(ChunkToOpen) + segments * sizeof(uint32_t)};
}

// Behind the copies of the ciphertext and of the table.
void Kernels::enqueue_open(Stream stream, const Area& area, size_t count, uint32_t segments) const {
  DevicePointer chunks_there = area.device;
  DevicePointer chunk_of_there = area.device + count * sizeof(ChunkToOpen);
  DevicePointer verdicts_there = area.device + area.verdicts_at();
  DevicePointer partial_there = area.device + area.partial_at();
  void* for_mac[] = {&chunks_there, &chunk_of_there, &partial_there};
  void* for_open[] = {&chunks_there, &chunk_of_there, &partial_there, &verdicts_there};
  // A verdict of the buffer's last use says nothing of this one.
  check(driver_, driver_.cuMemsetD8Async(verdicts_there, 0, count * sizeof(uint32_t), stream),
        "clearing memory of the CUDA device");
  launch(mac_, segments, stream, for_mac);
  launch(open_, segments, stream, for_open);
  check(
      driver_,
      driver_.cuMemcpyDtoHAsync(area.verdicts(), verdicts_there, count * sizeof(uint32_t), stream),
      "copying from the CUDA device");
}

// --- converting ----------------------------------------------------------------------------------

// Fills in which thread blocks are whose; how many there are.
uint32_t Kernels::number_blocks(unsigned buffer, size_t count) const {
  const Area area = this->area(buffer);
  const std::span<PieceToConvert> pieces = conversions(buffer).first(count);
  auto* const piece_of =
      reinterpret_cast<uint32_t*>(area.host + area.conversions_at() + pieces.size_bytes());
  uint32_t blocks = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t needed = (pieces[i].count + kConvertedAtOnce - 1) / kConvertedAtOnce;
    if (needed > area.thread_blocks - blocks)
      throw Error(Errc::invalid_argument, "more to convert than a staging buffer holds");
    pieces[i].first_block = blocks;
    std::fill_n(piece_of + blocks, needed, i);
    blocks += static_cast<uint32_t>(needed);
  }
  return blocks;
}

void Kernels::enqueue_convert(Stream stream, const Area& area, size_t count,
                              uint32_t blocks) const {
  DevicePointer pieces_there = area.device + area.conversions_at();
  DevicePointer piece_of_there = pieces_there + count * sizeof(PieceToConvert);
  void* parameters[] = {&pieces_there, &piece_of_there};
  launch(convert_, blocks, stream, parameters);
}

// --- the end of a buffer's use -------------------------------------------------------------------

std::optional<Kernels::Refused> Kernels::first_refused(unsigned buffer,
                                                       size_t count) const noexcept {
  const std::span<const uint32_t> verdicts(area(buffer).verdicts(), count);
  const auto found = std::find_if(verdicts.begin(), verdicts.end(),
                                  [](uint32_t verdict) { return verdict != kVerdictGenuine; });
  if (found == verdicts.end()) return std::nullopt;
  return Refused{static_cast<size_t>(found - verdicts.begin()), *found == kVerdictForged};
}

void Kernels::wipe(unsigned buffer) const noexcept {
  ::explicit_bzero(area(buffer).host, layout().nbytes());
}

// --- the self-test -------------------------------------------------------------------------------

namespace {

// The host's threads of a thread block, one after another.
class SerialBlock {
 public:
  explicit SerialBlock(uint32_t index) : index_(index) {}
  template <class F>
  void each(F f) {
    for (uint32_t t = 0; t < kThreads; ++t) f(t);
  }
  void sync() {}
  uint32_t index() const { return index_; }

 private:
  uint32_t index_;
};

constexpr size_t kTestNbytes = 201'074;  // two segments and an odd end
constexpr size_t kTestRoom = 201'088;    // the next multiple of 16
constexpr size_t kTestChunks = 4;        // genuine; a wrong MAC; a wrong first byte, last byte
constexpr size_t kTestValues = 1024;
constexpr uint32_t kTypes = 4;

// Bytes with no pattern; every value of each type comes up.
void fill_with_bytes(std::span<std::byte> bytes) noexcept {
  uint64_t state = 0x9e3779b97f4a7c15;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::byte>(state >> 56);
  }
}

}  // namespace

// Does on the device and on the host the same, and compares.
class SelfTest {
 public:
  explicit SelfTest(const Kernels& kernels) : kernels_(kernels), driver_(kernels.driver_) {
    try {
      check(driver_, driver_.cuMemHostAlloc(&host_, kNbytes, kHostAllocPortable),
            "pinning memory for a test of the kernels");
      check(driver_, driver_.cuMemAlloc(&device_, kNbytes),
            "allocating memory for a test of the kernels");
      check(driver_, driver_.cuStreamCreate(&stream_, kStreamNonBlocking),
            "creating a CUDA stream");
    } catch (...) {
      release();
      throw;
    }
  }
  ~SelfTest() { release(); }
  SelfTest(const SelfTest&) = delete;
  SelfTest& operator=(const SelfTest&) = delete;

  // What is wrong; empty where nothing is.
  std::string run() {
    prepare();
    expect_on_host();
    enqueue();
    check(driver_, driver_.cuStreamSynchronize(stream_), "testing the kernels");
    for (size_t i = 0; i < kTestChunks; ++i) {
      if (area().verdicts()[i] != (i == 0 ? kVerdictGenuine : kVerdictForged))
        return "the kernels took a wrong chunk for genuine, or a genuine one for wrong, when they "
               "were tested";
    }
    if (::memcmp(bytes(), expected_.data(), expected_.size()) != 0)
      return "the kernels gave wrong bytes when they were tested";
    return {};
  }

 private:
  static constexpr size_t kValuesAt = kTestChunks * kTestRoom;
  static constexpr size_t kConvertedAt = kValuesAt + 8 * kTestValues;
  static constexpr size_t kPiecesAt = kConvertedAt + kTypes * kTypes * 8 * kTestValues;
  static constexpr size_t kTableAt = kPiecesAt + kTypes * kTypes * sizeof(PieceToConvert);
  static constexpr size_t kAreaAt = kTableAt + kTypes * kTypes * sizeof(uint32_t);
  static constexpr size_t kNbytes = kAreaAt + 16 * 1024;
  static_assert(kPiecesAt % 8 == 0 && kAreaAt % 8 == 0);

  std::byte* bytes() const noexcept { return static_cast<std::byte*>(host_); }
  Kernels::Area area() const noexcept {
    return {bytes() + kAreaAt, device_ + kAreaAt, 2 * kTestChunks};
  }

  void release() noexcept {
    if (stream_) static_cast<void>(driver_.cuMemsetD8Async(device_, 0, kNbytes, stream_));
    // What runs, or may, keeps its memory.
    if (stream_ && driver_.cuStreamSynchronize(stream_) != kSuccess) return;
    if (stream_) static_cast<void>(driver_.cuStreamDestroy(stream_));
    if (device_) static_cast<void>(driver_.cuMemFree(device_));
    if (host_) static_cast<void>(driver_.cuMemFreeHost(host_));
  }

  // Descriptors and pieces with the addresses of that memory.
  ChunkToOpen chunk_at(size_t i, uint64_t base) const noexcept {
    ChunkToOpen chunk{};
    chunk.address = base + i * kTestRoom;
    chunk.nbytes = kTestNbytes;
    chunk.segments = 2;
    chunk.first_segment = static_cast<uint32_t>(2 * i);
    uint32_t next = 1;
    const auto word = [&] { return next = next * 1664525 + 1013904223; };
    for (uint32_t& part : chunk.subkey) part = word();
    for (uint32_t& part : chunk.nonce) part = word();
    for (uint32_t& part : chunk.pad) part = word();
    const uint32_t first = word(), second = word(), third = word(), fourth = word();
    fill_powers(chunk,
                {{first & kClamp[0], second & kClamp[1], third & kClamp[2], fourth & kClamp[3]}});
    return chunk;
  }
  PieceToConvert piece_at(uint32_t i, uint64_t base) const noexcept {
    return {base + kValuesAt,
            base + kConvertedAt + i * 8 * kTestValues,
            kTestValues,
            i / kTypes,
            i % kTypes,
            i,
            0};
  }

  void prepare() {
    ::memset(host_, 0, kNbytes);
    fill_with_bytes({bytes(), kTestNbytes});
    fill_with_bytes({bytes() + kValuesAt, 8 * kTestValues});
    for (size_t i = 1; i < kTestChunks; ++i)
      ::memcpy(bytes() + i * kTestRoom, bytes(), kTestNbytes);
    bytes()[2 * kTestRoom] ^= std::byte{1};
    bytes()[3 * kTestRoom + kTestNbytes - 1] ^= std::byte{0x80};
    for (uint32_t i = 0; i < kTypes * kTypes; ++i) {
      const PieceToConvert piece = piece_at(i, device_);
      ::memcpy(bytes() + kPiecesAt + i * sizeof piece, &piece, sizeof piece);
      ::memcpy(bytes() + kTableAt + i * sizeof i, &i, sizeof i);
    }
  }

  void expect_on_host() {
    expected_.assign(bytes(), bytes() + kPiecesAt);
    const auto base = reinterpret_cast<uintptr_t>(expected_.data());
    ChunkToOpen genuine = chunk_at(0, base);
    constexpr uint32_t kChunkOf[] = {0, 0};
    uint32_t partial[2 * kPartialWords];
    for (uint32_t segment = 0; segment < 2; ++segment) {
      SerialBlock block(segment);
      MacShared shared;
      mac_kernel(block, shared, &genuine, kChunkOf, partial);
    }
    const Words mac = mac_of(genuine, partial);
    ::memcpy(genuine.mac, mac.word, sizeof genuine.mac);
    uint32_t verdict = kVerdictMissing;
    for (uint32_t segment = 0; segment < 2; ++segment) {
      SerialBlock block(segment);
      OpenShared shared;
      open_kernel(block, shared, &genuine, kChunkOf, partial, &verdict);
    }
    for (uint32_t i = 0; i < kTypes * kTypes; ++i) {
      const PieceToConvert piece = piece_at(i, base);
      PieceToConvert alone = piece;
      alone.first_block = 0;
      constexpr uint32_t kPieceOf[] = {0};
      SerialBlock block(0);
      convert_kernel(block, &alone, kPieceOf);
    }
    for (size_t i = 0; i < kTestChunks; ++i) {
      area().chunks()[i] = chunk_at(i, device_);
      ::memcpy(area().chunks()[i].mac, mac.word, sizeof genuine.mac);
    }
    area().chunks()[1].mac[3] ^= 1u << 31;
  }

  void enqueue() {
    check(driver_, driver_.cuMemcpyHtoDAsync(device_, host_, kAreaAt, stream_),
          "copying to the CUDA device");
    const uint32_t segments = Kernels::number_segments(area(), kTestChunks);
    const Copy chunks = Kernels::chunk_table(area(), kTestChunks, segments);
    check(driver_, driver_.cuMemcpyHtoDAsync(chunks.device, chunks.host, chunks.nbytes, stream_),
          "copying to the CUDA device");
    kernels_.enqueue_open(stream_, area(), kTestChunks, segments);
    DevicePointer pieces = device_ + kPiecesAt;
    DevicePointer table = device_ + kTableAt;
    void* parameters[] = {&pieces, &table};
    kernels_.launch(kernels_.convert_, kTypes * kTypes, stream_, parameters);
    check(driver_, driver_.cuMemcpyDtoHAsync(host_, device_, kPiecesAt, stream_),
          "copying from the CUDA device");
  }

  static constexpr uint32_t kClamp[4] = {0x0fffffff, 0x0ffffffc, 0x0ffffffc, 0x0ffffffc};
  const Kernels& kernels_;
  const Driver& driver_;
  void* host_ = nullptr;
  DevicePointer device_ = 0;
  Stream stream_ = nullptr;
  std::vector<std::byte> expected_;
};

void Kernels::test(SelfTestRecord& tested) const {
  if (tested.wrong()) return;
  const std::string wrong = SelfTest(*this).run();
  tested.note(wrong);
  if (!wrong.empty()) throw Error(Errc::device, wrong);
}

Kernels::Kernels(const Driver& driver, SelfTestRecord& tested, unsigned buffers,
                 uint64_t buffer_nbytes)
    : driver_(driver),
      buffers_(buffers),
      room_(std::max<size_t>(1, static_cast<size_t>(buffer_nbytes / kLeastChunkNbytes))),
      thread_blocks_(kMostConversions +
                     static_cast<size_t>(buffer_nbytes / kLeastElementNbytes / kConvertedAtOnce)) {
  if (!has_functions(driver))
    throw Error(Errc::device, "the CUDA driver has no functions that load kernels");
  if (const std::string wrong = tested.wrong().value_or(""); !wrong.empty())
    throw Error(Errc::device, wrong);
  try {
    load();
    reserve();
    test(tested);
  } catch (...) {
    release();
    throw;
  }
}

}  // namespace tensorizer::device::cuda
