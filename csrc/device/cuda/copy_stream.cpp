#include "device/cuda/copy_stream.h"

#include <algorithm>
#include <string>

namespace tensorizer::device::cuda {
namespace {

constexpr size_t kMaxBatch = 4096;  // copies of one driver call

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
    if (last && last->buffer_offset + last->nbytes == piece.buffer_offset &&
        last->device_address + last->nbytes == piece.device_address) {
      last->nbytes += piece.nbytes;
    } else {
      merged.push_back(piece);
    }
  }
  return merged;
}

CopyStream::CopyStream(const Driver& driver, std::atomic<bool>& batches)
    : driver_(driver), batches_(batches) {
  check(driver_, driver_.cuStreamCreate(&stream_, kStreamNonBlocking), "creating a CUDA stream");
}

CopyStream::~CopyStream() { static_cast<void>(driver_.cuStreamDestroy(stream_)); }

void CopyStream::issue(std::byte* buffer, Event event, std::span<const CopyPiece> pieces,
                       Direction direction,
                       const std::function<void(Stream, const CopyWithTables&)>& around) {
  const auto copy = [&](std::span<const Copy> tables) {
    std::vector<Copy> copies(tables.begin(), tables.end());
    for (const CopyPiece& piece : merge_adjacent(pieces))
      copies.push_back(
          {buffer + piece.buffer_offset, address_of(piece.device_address), piece.nbytes});
    copy_many(copies, direction);
  };
  if (around) {
    around(stream_, copy);
  } else {
    copy({});
  }
  check(driver_, driver_.cuEventRecord(event, stream_), "recording a CUDA event");
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

Result CopyStream::settle() noexcept { return driver_.cuStreamSynchronize(stream_); }

void CopyStream::copy_one(const Copy& copy, Direction direction) {
  const Result result =
      direction == Direction::to_device
          ? driver_.cuMemcpyHtoDAsync(copy.device, copy.host, copy.nbytes, stream_)
          : driver_.cuMemcpyDtoHAsync(copy.host, copy.device, copy.nbytes, stream_);
  if (result != kSuccess)
    throw_cuda_error(
        driver_, result,
        std::string(action_of(direction)) + " (" + std::to_string(copy.nbytes) + " bytes)");
}

void CopyStream::copy_many(std::span<const Copy> copies, Direction direction) {
  while (!copies.empty()) {
    const auto part = copies.first(std::min(copies.size(), kMaxBatch));
    if (part.size() == 1 || !batches_ || !copy_batched(part, direction)) {
      for (const Copy& copy : part) copy_one(copy, direction);
    }
    copies = copies.subspan(part.size());
  }
}

// False when the driver wants none of it: the caller copies piece by piece, which gives the same
// bytes even if some of the batch were on their way already.
bool CopyStream::copy_batched(std::span<const Copy> copies, Direction direction) {
  std::vector<DevicePointer> destinations;
  std::vector<DevicePointer> sources;
  std::vector<size_t> sizes;
  for (const Copy& copy : copies) {
    const DevicePointer host = address_of(copy.host);
    destinations.push_back(direction == Direction::to_device ? copy.device : host);
    sources.push_back(direction == Direction::to_device ? host : copy.device);
    sizes.push_back(copy.nbytes);
  }
  CopyAttributes attributes;
  attributes.source_access_order = kSourceAccessInStreamOrder;
  size_t first = 0;
  size_t failed = 0;
  const Result result =
      driver_.cuMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), copies.size(),
                                 &attributes, &first, 1, &failed, stream_);
  if (result == kSuccess) return true;
  if (result != kNotSupported && result != kInvalidValue)
    throw_cuda_error(driver_, result,
                     std::string(action_of(direction)) + " (" + std::to_string(copies.size()) +
                         " pieces at once)");
  batches_ = false;
  return false;
}

}  // namespace tensorizer::device::cuda
