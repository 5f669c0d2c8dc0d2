// Constant time, checked by a machine: key and message are marked as uninitialised, and any branch
// or address that depends on them is reported. Two checkers know how: MemorySanitizer (clang; every
// kernel of this processor) and valgrind's memcheck (the code that gcc made; up to AVX2, which is
// what valgrind can run).
//
//   cmake -DCMAKE_CXX_COMPILER=clang++ -DTENSORIZER_CONSTANT_TIME=ON ... && ./ct_crypto_kernels
//   cmake -DTENSORIZER_CONSTANT_TIME=ON ... && valgrind --error-exitcode=1 ./ct_crypto_kernels
//
// Exit code 0: nothing found. With the argument --leak it branches on a key byte itself, which must
// be found.
#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#define UNDER_MSAN 1
#endif
#endif
#if defined(UNDER_MSAN)
#include <sanitizer/msan_interface.h>
#else
#include <valgrind/memcheck.h>
#endif

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "crypto/authentication.h"
#include "crypto/kernels/box_kernel.h"

namespace {

using tensorizer::crypto::BoxKernel;

#if defined(UNDER_MSAN)
void mark_secret(const void* data, size_t nbytes) { __msan_poison(data, nbytes); }
void mark_public(const void* data, size_t nbytes) { __msan_unpoison(data, nbytes); }
bool is_secret(const uint8_t* byte) { return __msan_test_shadow(byte, 1) == 0; }
constexpr bool kCanFollowTheVerdict = true;  // libsodium compares MACs, and is not instrumented
#else
void mark_secret(const void* data, size_t nbytes) { VALGRIND_MAKE_MEM_UNDEFINED(data, nbytes); }
void mark_public(const void* data, size_t nbytes) { VALGRIND_MAKE_MEM_DEFINED(data, nbytes); }
bool is_secret(const uint8_t* byte) {
  uint8_t bits = 0;
  return VALGRIND_GET_VBITS(byte, &bits, 1) != 1 || bits == 0xFF;
}
constexpr bool kCanFollowTheVerdict = false;
#endif

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(2);
}

void run(const BoxKernel& kernel, size_t nbytes) {
  std::vector<uint8_t> key(32, 0x5C), nonce(24, 7), plain(nbytes + 1, 0x33);
  std::vector<uint8_t> cipher(nbytes + 1), back(nbytes + 1), mac(16);
  mark_secret(key.data(), key.size());
  mark_secret(plain.data(), nbytes);
  kernel.seal(cipher.data(), mac.data(), plain.data(), nbytes, nonce.data(), key.data());
  for (const uint8_t& byte : mac) require(is_secret(&byte), "the checker lost track of the key");
  for (size_t i = 0; i < nbytes; ++i) require(is_secret(&cipher[i]), "the checker lost track");

  // What goes to a file is public from here on, and so is the verdict about a MAC.
  mark_public(cipher.data(), cipher.size());
  mark_public(mac.data(), mac.size());
  bool genuine =
      kernel.open(back.data(), cipher.data(), mac.data(), nbytes, nonce.data(), key.data());
  mark_public(&genuine, sizeof genuine);
  require(genuine, "the MAC does not fit");
  if (kCanFollowTheVerdict) {
    genuine =
        kernel.open(cipher.data(), cipher.data(), mac.data(), nbytes, nonce.data(), key.data());
    require(genuine, "the MAC does not fit in place");
  }
  std::printf("%-12s %6zu bytes: no branch or address depends on a secret\n", kernel.name.data(),
              nbytes);
}

// What compares tags and marks. libsodium itself is not instrumented under MemorySanitizer, which
// takes what it returns for public; there this shows that our code around it does not look.
void run_comparisons() {
  using namespace tensorizer::crypto;
  std::vector<std::byte> a(32, std::byte{0x5C}), b(32, std::byte{0x5C});
  b[31] = std::byte{0x5D};
  for (size_t nbytes : {8, 16, 32}) {
    mark_secret(a.data(), a.size());
    bool same = same_secret(std::span(a).first(nbytes), std::span(b).first(nbytes));
    mark_public(&same, sizeof same);
    require(same == (nbytes < 32), "a comparison is wrong");
    mark_public(a.data(), a.size());
  }
  const SecretKey key = SecretKey::filled_by([](std::span<std::byte, kKeyNbytes> bytes) {
    std::memset(bytes.data(), 0x5C, bytes.size());
    mark_secret(bytes.data(), bytes.size());
  });
  const SecretKey tag_key = derive_subkey(key, KeyUse::tag);
  const SecretKey mark_key = derive_subkey(key, KeyUse::mark);
  std::array<std::byte, 32> digest{};
  Tag tag = make_tag(digest, tag_key), stored = tag;
  mark_public(stored.data(), stored.size());  // it is in the file
  bool fits = same_secret(tag, stored);
  mark_public(&fits, sizeof fits);
  require(fits, "a tag does not fit itself");
  std::array<std::byte, kNonceNbytes> nonce{};
  mark_nonce(nonce, mark_key);
  mark_public(nonce.data(), nonce.size());  // in the file, too
  bool marked = is_marked(nonce, mark_key);
  mark_public(&marked, sizeof marked);
  require(marked, "a mark is not found");
  std::puts("comparisons of tags and marks: no branch or address depends on a secret");
}

int leak() {
  std::vector<uint8_t> key(32, 0x5C);
  mark_secret(key.data(), key.size());
  if (key[3] > 9) std::puts("a secret decided this");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--leak") == 0) return leak();
  run_comparisons();
  for (const BoxKernel* kernel : tensorizer::crypto::compiled_kernels()) {
    if (!kernel->usable() || kernel == &tensorizer::crypto::kLibsodiumKernel) continue;
    for (const size_t nbytes : {0, 1, 16, 31, 32, 33, 63, 64, 96, 500, 511, 512, 513, 1056, 1057,
                                2048, 9000, 20000, 40007}) {
      run(*kernel, nbytes);
    }
  }
  return 0;
}
