#include "device/cuda/copy_stream.h"

#include <algorithm>
#include <string>

#include "device/cuda/kernels/scatter.h"

namespace tensorizer::device::cuda {
namespace {

constexpr size_t kMaxBatch = 4096;       // copies of one driver call
constexpr size_t kMinScatterPieces = 8;  // fewer are not worth a launch

DevicePointer address_of(const void* pointer) noexcept {
  return reinterpret_cast<DevicePointer>(pointer);
}

const char* action_of(Direction direction) noexcept {
  return direction == Direction::to_device ? "copying to the CUDA device"
                                           : "copying from the CUDA device";
}

}  // namespace

std::vector<CopyPiece> merge_adjacent(std::span<const CopyPiece> pieces) {
  std::vector<CopyPiece> merged;
  merged.reserve(pieces.size());
  for (const CopyPiece& piece : pieces) {
    if (piece.nbytes == 0) continue;
    CopyPiece* last = merged.empty() ? nullptr : &merged.back();
    if (last && last->slot_offset + last->nbytes == piece.slot_offset &&
        last->device_address + last->nbytes == piece.device_address) {
      last->nbytes += piece.nbytes;
    } else {
      merged.push_back(piece);
    }
  }
  return merged;
}

CopyStream::CopyStream(Device& device, bool use_scatter_kernel)
    : driver_(device.driver()),
      scatter_(use_scatter_kernel ? device.kernel(kScatterKernelName) : nullptr),
      batches_(driver_.cuMemcpyBatchAsync != nullptr) {
  check(driver_, driver_.cuStreamCreate(&stream_, kStreamNonBlocking), "creating a CUDA stream");
}

CopyStream::~CopyStream() { static_cast<void>(driver_.cuStreamDestroy(stream_)); }

void CopyStream::issue(PinnedRing& ring, unsigned slot, std::span<const CopyPiece> pieces,
                       Direction direction) {
  std::byte* const bytes = ring.slots().bytes(slot).data();
  std::vector<CopyPiece> left = merge_adjacent(pieces);
  if (scatter_ && direction == Direction::to_device)
    left = scatter_small(ring, slot, std::move(left));
  copy_many(bytes, left, direction);
  record(ring.event(slot));
}

void CopyStream::zero(std::span<const DeviceRange> ranges) {
  for (const DeviceRange& range : ranges) {
    if (range.nbytes == 0) continue;
    check(driver_,
          driver_.cuMemsetD8Async(address_of(range.device_address), 0, range.nbytes, stream_),
          "wiping memory of the CUDA device");
  }
  check(driver_, driver_.cuStreamSynchronize(stream_), "wiping memory of the CUDA device");
}

void CopyStream::wait_for(Event event) {
  check(driver_, driver_.cuStreamWaitEvent(stream_, event, 0), "ordering copies after an event");
}

void CopyStream::record(Event event) {
  check(driver_, driver_.cuEventRecord(event, stream_), "recording a CUDA event");
}

bool CopyStream::settle() noexcept { return driver_.cuStreamSynchronize(stream_) == kSuccess; }

void CopyStream::copy_one(std::byte* slot, const CopyPiece& piece, Direction direction) {
  std::byte* const host = slot + piece.slot_offset;
  const DevicePointer device = address_of(piece.device_address);
  const Result result = direction == Direction::to_device
                            ? driver_.cuMemcpyHtoDAsync(device, host, piece.nbytes, stream_)
                            : driver_.cuMemcpyDtoHAsync(host, device, piece.nbytes, stream_);
  if (result != kSuccess)
    throw_cuda_error(
        driver_, result,
        std::string(action_of(direction)) + " (" + std::to_string(piece.nbytes) + " bytes)");
}

void CopyStream::copy_each(std::byte* slot, std::span<const CopyPiece> pieces,
                           Direction direction) {
  for (const CopyPiece& piece : pieces) copy_one(slot, piece, direction);
}

void CopyStream::copy_many(std::byte* slot, std::span<const CopyPiece> pieces,
                           Direction direction) {
  while (!pieces.empty()) {
    const auto part = pieces.first(std::min(pieces.size(), kMaxBatch));
    if (part.size() == 1 || !batches_ || !copy_batched(slot, part, direction))
      copy_each(slot, part, direction);
    pieces = pieces.subspan(part.size());
  }
}

// False when the driver wants none of it: the caller copies piece by piece, which gives the same
// bytes even if some of the batch were on their way already.
bool CopyStream::copy_batched(std::byte* slot, std::span<const CopyPiece> pieces,
                              Direction direction) {
  std::vector<DevicePointer> destinations;
  std::vector<DevicePointer> sources;
  std::vector<size_t> sizes;
  for (const CopyPiece& piece : pieces) {
    const DevicePointer host = address_of(slot + piece.slot_offset);
    const DevicePointer device = address_of(piece.device_address);
    destinations.push_back(direction == Direction::to_device ? device : host);
    sources.push_back(direction == Direction::to_device ? host : device);
    sizes.push_back(piece.nbytes);
  }
  CopyAttributes attributes;
  attributes.source_access_order = kSourceAccessInStreamOrder;
  size_t first = 0;
  size_t failed = 0;
  const Result result =
      driver_.cuMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), pieces.size(),
                                 &attributes, &first, 1, &failed, stream_);
  if (result == kSuccess) return true;
  if (result != kNotSupported && result != kInvalidValue)
    throw_cuda_error(driver_, result,
                     std::string(action_of(direction)) + " (" + std::to_string(pieces.size()) +
                         " pieces at once)");
  batches_ = false;
  return false;
}

DevicePointer CopyStream::mapped(std::byte* host) {
  DevicePointer pointer = 0;
  check(driver_, driver_.cuMemHostGetDevicePointer(&pointer, host, 0),
        "finding the device's address of pinned memory");
  return pointer;
}

// Launches the kernel for as many small pieces as the slot's table holds; returns the others.
std::vector<CopyPiece> CopyStream::scatter_small(PinnedRing& ring, unsigned slot,
                                                 std::vector<CopyPiece> pieces) {
  constexpr size_t kTableRows = PinnedRing::kTableNbytes / sizeof(ScatterPiece);
  const auto is_small = [](const CopyPiece& piece) {
    return piece.nbytes <= kScatterMaxPieceNbytes;
  };
  if (std::count_if(pieces.begin(), pieces.end(), is_small) <
      static_cast<std::ptrdiff_t>(kMinScatterPieces))
    return pieces;
  auto* table = reinterpret_cast<ScatterPiece*>(ring.table(slot));
  uint32_t rows = 0;
  std::vector<CopyPiece> others;
  for (const CopyPiece& piece : pieces) {
    if (is_small(piece) && rows < kTableRows) {
      table[rows++] = {piece.slot_offset, address_of(piece.device_address), piece.nbytes};
    } else {
      others.push_back(piece);
    }
  }
  DevicePointer device_table = mapped(ring.table(slot));
  DevicePointer device_slot = mapped(ring.slots().bytes(slot).data());
  void* parameters[] = {&device_table, &rows, &device_slot};
  check(driver_,
        driver_.cuLaunchKernel(scatter_, std::min(rows, kScatterMaxBlocks), 1, 1, kScatterThreads,
                               1, 1, 0, stream_, parameters, nullptr),
        "launching the scatter kernel");
  return others;
}

}  // namespace tensorizer::device::cuda
