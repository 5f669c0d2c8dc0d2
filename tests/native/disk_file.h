// A file on a disk, and how much of it is in the page cache.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bytes.h"
#include "io/local/file_source.h"

namespace tensorizer::testing {

// Whether a file is cached is tried at some place, and the kernel reads what is around it.
inline constexpr size_t kTriedPages = 64;

class DiskFile {
 public:
  explicit DiskFile(std::span<const std::byte> bytes) : nbytes_(bytes.size()) {
    std::string path = (std::filesystem::temp_directory_path() / "disk-file-XXXXXX").string();
    fd_ = UniqueFd(mkstemp(path.data()));
    unlink(path.c_str());
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t wrote =
          pwrite(fd_.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      if (wrote <= 0) throw std::runtime_error("cannot write a file");
      done += static_cast<size_t>(wrote);
    }
    fsync(fd_.get());
  }

  int fd() const noexcept { return fd_.get(); }

  std::shared_ptr<io::FileSource> source(bool direct) const {
    auto source = std::make_shared<io::FileSource>(UniqueFd(dup(fd_.get())), "f");
    source->set_direct(direct);
    return source;
  }

  // False where the file system keeps files in memory, or reads all of them through the cache.
  bool can_be_uncached() const {
    for (int attempt = 0; attempt < 50; ++attempt) {
      posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED);
      if (cached_pages() == 0) return source(true)->traits().direct;
      usleep(20'000);  // the kernel keeps pages now and then that it was asked to drop
    }
    return false;
  }

  size_t cached_pages() const {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* const mapped = mmap(nullptr, nbytes_, PROT_READ, MAP_SHARED, fd_.get(), 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("cannot map a file");
    std::vector<unsigned char> resident((nbytes_ + page - 1) / page);
    mincore(mapped, nbytes_, resident.data());
    munmap(mapped, nbytes_);
    return static_cast<size_t>(std::ranges::count_if(resident, [](auto r) { return r & 1; }));
  }

 private:
  const size_t nbytes_;
  UniqueFd fd_;
};

}  // namespace tensorizer::testing
