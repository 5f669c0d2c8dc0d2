// What this machine can do at most: plain C++, the same threads, blocks and huge pages that a
// loader could use. usage: limits WHAT THREADS [FILE [NBYTES]]      prints {"seconds": ...}
//   hot     copy FILE (in the page cache, mapped) into fresh huge-page memory
//   resident  the same copy once more into memory that is there already
//   touch   map FILE and add up all its bytes
//   direct  read FILE with O_DIRECT into fresh huge-page memory
//   write   write NBYTES of resident memory to FILE;  write-sync: until fsync returns
//   sha256  hash FILE (in the page cache, mapped) with OpenSSL, in pieces of 16 MiB
//   box-open, box-seal  decrypt or encrypt NBYTES with libsodium's secretbox in chunks of 2 MiB,
//           from resident memory to resident memory (FILE is -)
// As much memory as the clock's time will need is faulted in and freed right before the clock
// starts: on virtual machines freed memory may have gone back to the host, and getting it again is
// no property of the code measured.

#include <fcntl.h>
#include <openssl/evp.h>
#include <sodium.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBlockBytes = 8u << 20;
constexpr size_t kHugePageBytes = 2u << 20;
constexpr size_t kChunkBytes = 2u << 20;  // of the cipher: docs/format.md, "Encryption"

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Fresh anonymous memory that asks for huge pages and starts on a huge-page boundary.
class HugeMemory {
 public:
  explicit HugeMemory(size_t nbytes) : mapped_(round_up(nbytes, kHugePageBytes) + kHugePageBytes) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) fail("mmap");
    data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(base_), kHugePageBytes));
    madvise(data_, mapped_ - kHugePageBytes, MADV_HUGEPAGE);
  }
  ~HugeMemory() { munmap(base_, mapped_); }
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;
  char* data() const { return data_; }

 private:
  size_t mapped_;
  void* base_;
  char* data_;
};

class File {
 public:
  File(const char* path, int flags) : fd_(open(path, flags, 0644)) {
    if (fd_ < 0) fail(path);
    struct stat info;
    if (fstat(fd_, &info) != 0) fail(path);
    size_ = static_cast<size_t>(info.st_size);
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  size_t size() const { return size_; }

 private:
  int fd_;
  size_t size_;
};

// Calls work(begin, end) for every block of [0, total) from `threads` threads.
void in_blocks(size_t total, size_t threads, size_t block,
               const std::function<void(size_t, size_t)>& work) {
  std::atomic<size_t> next{0};
  auto loop = [&] {
    for (size_t begin; (begin = next.fetch_add(block)) < total;) {
      work(begin, std::min(begin + block, total));
    }
  };
  std::vector<std::thread> pool;
  for (size_t i = 1; i < threads; ++i) pool.emplace_back(loop);
  loop();
  for (std::thread& thread : pool) thread.join();
}

void fault_in_and_free(size_t nbytes) {
  HugeMemory memory(nbytes);
  in_blocks(nbytes, 2, kBlockBytes,
            [&](size_t begin, size_t end) { std::memset(memory.data() + begin, 1, end - begin); });
}

double seconds_of(const std::function<void()>& work) {
  auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

const char* map_file(const File& file) {
  void* mapped = mmap(nullptr, file.size(), PROT_READ, MAP_SHARED, file.fd(), 0);
  if (mapped == MAP_FAILED) fail("mmap");
  return static_cast<const char*>(mapped);
}

// A block's page table entries in one call instead of a fault for every 64 KiB (Linux 5.14;
// harmless before).
void populate(const char* begin, size_t nbytes) {
#ifdef MADV_POPULATE_READ
  const size_t slack = reinterpret_cast<size_t>(begin) % 4096;
  madvise(const_cast<char*>(begin) - slack, nbytes + slack, MADV_POPULATE_READ);
#endif
}

double copy_hot(const char* path, size_t threads, bool again) {
  File file(path, O_RDONLY);
  fault_in_and_free(file.size());
  HugeMemory* target = nullptr;
  const char* source = nullptr;
  auto copy = [&] {
    in_blocks(file.size(), threads, kBlockBytes, [&](size_t begin, size_t end) {
      populate(source + begin, end - begin);
      std::memcpy(target->data() + begin, source + begin, end - begin);
    });
  };
  const double first = seconds_of([&] {
    target = new HugeMemory(file.size());  // freed by the end of the process, after the clock
    source = map_file(file);
    copy();
  });
  return again ? seconds_of(copy) : first;
}

double touch(const char* path, size_t threads) {
  File file(path, O_RDONLY);
  std::atomic<uint64_t> sum{0};
  const double seconds = seconds_of([&] {
    const char* source = map_file(file);
    in_blocks(file.size(), threads, kBlockBytes, [&](size_t begin, size_t end) {
      populate(source + begin, end - begin);
      uint64_t own = 0;
      for (size_t at = begin; at + 8 <= end; at += 8) {
        uint64_t word;
        std::memcpy(&word, source + at, 8);
        own += word;
      }
      sum += own;
    });
  });
  std::fprintf(stderr, "%s", sum == 1 ? " " : "");  // the sum is used, so that it is computed
  return seconds;
}

double read_direct(const char* path, size_t threads) {
  File file(path, O_RDONLY | O_DIRECT);
  const size_t size = file.size();
  fault_in_and_free(size);
  return seconds_of([&] {
    auto* target = new HugeMemory(size + kBlockBytes);
    in_blocks(size, threads, kBlockBytes, [&](size_t begin, size_t end) {
      while (begin < end) {
        const ssize_t got =
            pread(file.fd(), target->data() + begin, kBlockBytes, static_cast<off_t>(begin));
        if (got <= 0) fail("pread");
        begin += static_cast<size_t>(got);
      }
    });
  });
}

double write_out(const char* path, size_t threads, size_t nbytes, bool sync_it) {
  HugeMemory source(nbytes);
  for (size_t at = 0; at < nbytes; at += 8) {  // no page is like another, none is zero
    const uint64_t word = at * 0x9E3779B97F4A7C15u + 1;
    std::memcpy(source.data() + at, &word, std::min<size_t>(8, nbytes - at));
  }
  unlink(path);
  sync();
  fault_in_and_free(nbytes);
  const double seconds = seconds_of([&] {
    File file(path, O_WRONLY | O_CREAT | O_TRUNC);
    in_blocks(nbytes, threads, kBlockBytes, [&](size_t begin, size_t end) {
      while (begin < end) {
        const ssize_t put =
            pwrite(file.fd(), source.data() + begin, end - begin, static_cast<off_t>(begin));
        if (put <= 0) fail("pwrite");
        begin += static_cast<size_t>(put);
      }
    });
    if (sync_it && fsync(file.fd()) != 0) fail("fsync");
  });
  unlink(path);
  return seconds;
}

double hash_sha256(const char* path, size_t threads) {
  File file(path, O_RDONLY);
  const char* source = map_file(file);
  populate(source, file.size());
  const EVP_MD* sha256 = EVP_sha256();
  return seconds_of([&] {
    in_blocks(file.size(), threads, 2 * kBlockBytes, [&](size_t begin, size_t end) {
      unsigned char digest[EVP_MAX_MD_SIZE];
      if (EVP_Digest(source + begin, end - begin, digest, nullptr, sha256, nullptr) != 1) {
        fail("EVP_Digest");
      }
    });
  });
}

using Bytes = std::vector<unsigned char>;

// Calls crypt(i, begin, end) for every chunk.
double seconds_of_chunks(size_t nbytes, size_t threads,
                         const std::function<void(size_t, size_t, size_t)>& crypt) {
  return seconds_of([&] {
    in_blocks(nbytes, threads, kChunkBytes,
              [&](size_t begin, size_t end) { crypt(begin / kChunkBytes, begin, end); });
  });
}

double box(size_t nbytes, size_t threads, bool open) {
  if (sodium_init() < 0) fail("sodium_init");
  HugeMemory plain_memory(nbytes), cipher_memory(nbytes);
  auto* plain = reinterpret_cast<unsigned char*>(plain_memory.data());
  auto* cipher = reinterpret_cast<unsigned char*>(cipher_memory.data());
  Bytes key(crypto_secretbox_KEYBYTES, 7);
  Bytes macs((nbytes / kChunkBytes + 1) * crypto_secretbox_MACBYTES);
  auto nonce_of = [](size_t chunk) {
    Bytes nonce(crypto_secretbox_NONCEBYTES, 1);
    std::memcpy(nonce.data(), &chunk, sizeof chunk);
    return nonce;
  };
  auto seal_chunk = [&](size_t i, size_t begin, size_t end) {
    crypto_secretbox_detached(cipher + begin, &macs[i * crypto_secretbox_MACBYTES], plain + begin,
                              end - begin, nonce_of(i).data(), key.data());
  };
  in_blocks(nbytes, threads, kBlockBytes, [&](size_t begin, size_t end) {
    std::memset(plain + begin, 1, end - begin);
    std::memset(cipher + begin, 2, end - begin);
  });
  const double sealing = seconds_of_chunks(nbytes, threads, seal_chunk);
  if (!open) return sealing;
  std::memset(plain, 0, nbytes);
  return seconds_of_chunks(nbytes, threads, [&](size_t i, size_t begin, size_t end) {
    if (crypto_secretbox_open_detached(plain + begin, cipher + begin,
                                       &macs[i * crypto_secretbox_MACBYTES], end - begin,
                                       nonce_of(i).data(), key.data()) != 0) {
      fail("crypto_secretbox_open_detached");
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: limits WHAT THREADS FILE [NBYTES]\n");
    return 2;
  }
  const std::string what = argv[1];
  const size_t threads = std::strtoull(argv[2], nullptr, 10);
  const char* path = argv[3];
  const size_t nbytes = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 0;
  double seconds;
  if (what == "hot") {
    seconds = copy_hot(path, threads, false);
  } else if (what == "resident") {
    seconds = copy_hot(path, threads, true);
  } else if (what == "touch") {
    seconds = touch(path, threads);
  } else if (what == "direct") {
    seconds = read_direct(path, threads);
  } else if (what == "write" || what == "write-sync") {
    seconds = write_out(path, threads, nbytes, what == "write-sync");
  } else if (what == "sha256") {
    seconds = hash_sha256(path, threads);
  } else if (what == "box-open" || what == "box-seal") {
    seconds = box(nbytes, threads, what == "box-open");
  } else {
    std::fprintf(stderr, "limits: unknown: %s\n", what.c_str());
    return 2;
  }
  std::printf("{\"seconds\": %.9f}\n", seconds);
}
