#include "device/cuda/kernel_module.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/wipe.h"
#include "device/cuda/kernels/secretbox.h"

namespace tensorizer::device::cuda {
namespace {

// Written by the build from kernels.ptx.
constexpr char kText[] =
#include "kernels_ptx.inc"
    ;

constexpr uint64_t kLeastChunkNbytes = 64 * 1024;

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

void Kernels::launch(Function function, unsigned blocks, Stream stream, void** parameters) const {
  check(driver_,
        driver_.cuLaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters,
                               nullptr),
        "starting a kernel");
}

void Kernels::enqueue(Stream stream, unsigned buffer, size_t count,
                      const CopyWithTables& copy) const {
  const Area area = this->area(buffer);
  const uint32_t segments = number_segments(area, count);
  const Copy table = chunk_table(area, count, segments);
  const auto clear = [&] { return driver_.cuMemsetD8Async(area.device, 0, area.nbytes(), stream); };
  try {
    copy({&table, 1});
    enqueue_open(stream, area, count, segments);
  } catch (...) {
    static_cast<void>(clear());
    throw;
  }
  check(driver_, clear(), "wiping memory of the CUDA device");
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
  tensorizer::wipe(area(buffer).host, layout().nbytes());
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

// Bytes with no pattern.
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

  // The difference that it has found; empty if there is none.
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
  static constexpr size_t kAreaAt = kTestChunks * kTestRoom;
  static constexpr size_t kNbytes = kAreaAt + 16 * 1024;
  static_assert(kAreaAt % 8 == 0);

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

  // Descriptors with the addresses of that memory.
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

  void prepare() {
    ::memset(host_, 0, kNbytes);
    fill_with_bytes({bytes(), kTestNbytes});
    for (size_t i = 1; i < kTestChunks; ++i)
      ::memcpy(bytes() + i * kTestRoom, bytes(), kTestNbytes);
    bytes()[2 * kTestRoom] ^= std::byte{1};
    bytes()[3 * kTestRoom + kTestNbytes - 1] ^= std::byte{0x80};
  }

  void expect_on_host() {
    expected_.assign(bytes(), bytes() + kAreaAt);
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
      OpenShared shared{};
      open_kernel(block, shared, &genuine, kChunkOf, partial, &verdict);
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
    check(driver_, driver_.cuMemcpyDtoHAsync(host_, device_, kAreaAt, stream_),
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
      room_(std::max<size_t>(1, static_cast<size_t>(buffer_nbytes / kLeastChunkNbytes))) {
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
