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
                       Direction direction, const std::function<void(Stream)>& more) {
  copy_many(buffer, merge_adjacent(pieces), direction);
  if (more) more(stream_);
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

void CopyStream::copy_one(std::byte* buffer, const CopyPiece& piece, Direction direction) {
  std::byte* const host = buffer + piece.buffer_offset;
  const DevicePointer device = address_of(piece.device_address);
  const Result result = direction == Direction::to_device
                            ? driver_.cuMemcpyHtoDAsync(device, host, piece.nbytes, stream_)
                            : driver_.cuMemcpyDtoHAsync(host, device, piece.nbytes, stream_);
  if (result != kSuccess)
    throw_cuda_error(
        driver_, result,
        std::string(action_of(direction)) + " (" + std::to_string(piece.nbytes) + " bytes)");
}

void CopyStream::copy_many(std::byte* buffer, std::span<const CopyPiece> pieces,
                           Direction direction) {
  while (!pieces.empty()) {
    const auto part = pieces.first(std::min(pieces.size(), kMaxBatch));
    if (part.size() == 1 || !batches_ || !copy_batched(buffer, part, direction)) {
      for (const CopyPiece& piece : part) copy_one(buffer, piece, direction);
    }
    pieces = pieces.subspan(part.size());
  }
}

// False when the driver wants none of it: the caller copies piece by piece, which gives the same
// bytes even if some of the batch were on their way already.
bool CopyStream::copy_batched(std::byte* buffer, std::span<const CopyPiece> pieces,
                              Direction direction) {
  std::vector<DevicePointer> destinations;
  std::vector<DevicePointer> sources;
  std::vector<size_t> sizes;
  for (const CopyPiece& piece : pieces) {
    const DevicePointer host = address_of(buffer + piece.buffer_offset);
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

}  // namespace tensorizer::device::cuda
