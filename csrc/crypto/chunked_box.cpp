#include "crypto/chunked_box.h"

#include <sodium.h>

#include <algorithm>
#include <atomic>

#include "core/endian.h"
#include "core/wipe.h"
#include "crypto/kernels/box_kernel.h"

namespace tensorizer::crypto {
namespace {

static_assert(kKeyNbytes == crypto_secretbox_KEYBYTES);
static_assert(kNonceNbytes == crypto_secretbox_NONCEBYTES);
static_assert(kMacNbytes == crypto_secretbox_MACBYTES);

const BoxKernel* best_kernel() noexcept {
  for (const BoxKernel* kernel : compiled_kernels()) {
    if (kernel->usable()) return kernel;
  }
  return &kLibsodiumKernel;
}

// Relaxed is enough: kernels are constants, and any of them is right for any call.
std::atomic<const BoxKernel*>& active() noexcept {
  static std::atomic<const BoxKernel*> kernel{best_kernel()};
  return kernel;
}

const BoxKernel& current() noexcept { return *active().load(std::memory_order_relaxed); }

// Kernels get a real address even for nothing, so that no null pointer meets a C function that
// forbids it.
uint8_t nothing[1];
uint8_t* mutable_u8(std::span<std::byte> bytes) noexcept {
  return bytes.empty() ? nothing : reinterpret_cast<uint8_t*>(bytes.data());
}
const uint8_t* u8(std::span<const std::byte> bytes) noexcept {
  return bytes.empty() ? nothing : reinterpret_cast<const uint8_t*>(bytes.data());
}

}  // namespace

void seal(std::span<std::byte> cipher, std::span<std::byte, kMacNbytes> mac,
          std::span<const std::byte> plain, NonceView nonce, const SecretKey& key) noexcept {
  current().seal(mutable_u8(cipher), mutable_u8(mac), u8(plain), plain.size(), u8(nonce),
                 u8(key.bytes()));
}

bool open(std::span<std::byte> plain, std::span<const std::byte> cipher,
          std::span<const std::byte, kMacNbytes> mac, NonceView nonce,
          const SecretKey& key) noexcept {
  const bool genuine = current().open(mutable_u8(plain), u8(cipher), u8(mac), cipher.size(),
                                      u8(nonce), u8(key.bytes()));
  if (!genuine && plain.data() != cipher.data()) wipe(plain.data(), plain.size());
  return genuine;
}

std::array<std::byte, kNonceNbytes> nonce_plus(NonceView nonce, uint64_t n) noexcept {
  std::array<std::byte, kNonceNbytes> sum;
  std::copy(nonce.begin(), nonce.end(), sum.begin());
  uint64_t carry = n;
  for (size_t at = 0; at < kNonceNbytes && carry != 0; at += sizeof carry) {
    const uint64_t limb = load_le<uint64_t>(sum.data() + at) + carry;
    carry = limb < carry ? 1 : 0;
    store_le(sum.data() + at, limb);
  }
  return sum;
}

void random_bytes(std::span<std::byte> out) noexcept {
  randombytes_buf(mutable_u8(out), out.size());
}

std::vector<std::string_view> available_kernels() {
  std::vector<std::string_view> names;
  for (const BoxKernel* kernel : compiled_kernels()) {
    if (kernel->usable()) names.push_back(kernel->name);
  }
  return names;
}

std::string_view active_kernel() noexcept { return current().name; }

bool select_kernel(std::string_view name) noexcept {
  for (const BoxKernel* kernel : compiled_kernels()) {
    if (kernel->name == name && kernel->usable()) {
      active().store(kernel, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace tensorizer::crypto
