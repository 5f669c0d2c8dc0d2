// A disk that can lose power: stands below a file sink, passes every call on to the system, and
// keeps what the disk would have. Writes since the last sync are in the hands of the kernel: any of
// their sectors may have arrived, in any order. Names are journaled: those since the last sync of
// their folder arrive in order, up to some point. A sync that fails says so once: what it should
// have written is dropped, and the next one knows nothing of it.
//
// One target path; descriptors stay open while the recorder is used, so a number means one file.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "io/local/file_calls.h"

namespace tensorizer::tests {

class PowerCut final : public io::FileCalls {
 public:
  using Content = std::vector<std::byte>;

  struct Step {
    enum class Kind { create, write, truncate, sync, lose, link, rename, unlink, sync_folder };
    Kind kind;
    ino_t file = 0;
    uint64_t offset = 0;  // or the new size
    Content bytes{};
    std::string name{}, to{};
  };

  std::vector<Step> steps;
  int fail_at = -1;       // this step fails, and whatever follows it
  int fail_sync_at = -1;  // where this step is a sync, it fails

  size_t count(Step::Kind kind) const {
    return static_cast<size_t>(std::count_if(steps.begin(), steps.end(),
                                             [&](const Step& step) { return step.kind == kind; }));
  }

  int open_unnamed(const std::string& folder, unsigned mode) override {
    return created(FileCalls::open_unnamed(folder, mode), {});
  }
  int open_new(const std::string& path, unsigned mode) override {
    return created(FileCalls::open_new(path, mode), path);
  }
  ssize_t write(int fd, const iovec* vectors, int count, uint64_t offset) override {
    if (broken()) return -1;
    Step step{Step::Kind::write, inode(fd), offset};
    for (int i = 0; i < count; ++i) {
      const auto* data = static_cast<const std::byte*>(vectors[i].iov_base);
      step.bytes.insert(step.bytes.end(), data, data + vectors[i].iov_len);
    }
    add(std::move(step));
    return FileCalls::write(fd, vectors, count, offset);
  }
  ssize_t copy(int from, off_t* from_offset, int to, off_t* to_offset, uint64_t nbytes) override {
    if (broken()) return -1;
    Step step{Step::Kind::write, inode(to), static_cast<uint64_t>(*to_offset)};
    step.bytes.resize(nbytes);
    const ssize_t got = pread(from, step.bytes.data(), nbytes, *from_offset);
    step.bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    add(std::move(step));
    return FileCalls::copy(from, from_offset, to, to_offset, nbytes);
  }
  int truncate(int fd, uint64_t nbytes) override {
    if (broken()) return -1;
    add({Step::Kind::truncate, inode(fd), nbytes});
    return FileCalls::truncate(fd, nbytes);
  }
  int sync(int fd) override { return synced(fd); }
  int sync_data(int fd) override { return synced(fd); }
  int link(int fd, const std::string& path) override {
    if (broken()) return -1;
    Step step{Step::Kind::link, inode(fd)};
    step.name = path;
    add(std::move(step));
    return FileCalls::link(fd, path);
  }
  int rename(const std::string& from, const std::string& to) override {
    if (broken()) return -1;
    Step step{Step::Kind::rename};
    step.name = from;
    step.to = to;
    add(std::move(step));
    return FileCalls::rename(from, to);
  }
  int unlink(const std::string& path) noexcept override {
    Step step{Step::Kind::unlink};
    step.name = path;
    add(std::move(step));
    return FileCalls::unlink(path);
  }
  int sync_folder(const std::string& folder) override {
    if (broken()) return -1;
    add({Step::Kind::sync_folder});
    return FileCalls::sync_folder(folder);
  }

  // What is under `target` when the machine, or (`whole`) only the process, stops after the first
  // `done` steps; nullopt: no file. The step that is under way may be torn too.
  std::optional<Content> after(size_t done, const std::string& target, bool whole,
                               std::mt19937& random) const {
    Disk disk;
    for (size_t i = 0; i < done; ++i) disk.take(steps[i]);
    if (whole) return disk.under(target);
    return disk.lose_power(random).under(target);
  }

 private:
  static constexpr uint64_t kSector = 512;

  struct File {
    Content durable;
    std::vector<Step> pending;  // writes and truncations since the last sync
  };

  struct Disk {
    std::map<ino_t, File> files;
    std::map<std::string, ino_t> names;
    std::vector<Step> pending_names;

    void take(const Step& step) {
      switch (step.kind) {
        case Step::Kind::create:
          files[step.file] = {};
          if (!step.name.empty()) pending_names.push_back(step);
          break;
        case Step::Kind::write:
        case Step::Kind::truncate:
          files[step.file].pending.push_back(step);
          break;
        case Step::Kind::sync:
          settle(files[step.file]);
          break;
        case Step::Kind::lose:
          files[step.file].pending.clear();
          break;
        case Step::Kind::link:
        case Step::Kind::rename:
        case Step::Kind::unlink:
          pending_names.push_back(step);
          break;
        case Step::Kind::sync_folder:
          for (const Step& name : pending_names) take_name(name);
          pending_names.clear();
          break;
      }
    }

    static void settle(File& file) {
      for (const Step& step : file.pending) apply(file.durable, step);
      file.pending.clear();
    }

    static void apply(Content& content, const Step& step) {
      if (step.kind == Step::Kind::truncate) {
        content.resize(step.offset);
      } else {
        put(content, step.offset, step.bytes.data(), step.bytes.size());
      }
    }

    static void put(Content& content, uint64_t offset, const std::byte* data, uint64_t nbytes) {
      if (nbytes == 0) return;
      content.resize(std::max<size_t>(content.size(), offset + nbytes));
      std::memcpy(content.data() + offset, data, nbytes);
    }

    void take_name(const Step& step) {
      if (step.kind == Step::Kind::rename) {
        names[step.to] = names.at(step.name);
        names.erase(step.name);
      } else if (step.kind == Step::Kind::unlink) {
        names.erase(step.name);
      } else {
        names[step.name] = step.file;
      }
    }

    std::optional<Content> under(const std::string& target) {
      for (const Step& name : pending_names) take_name(name);
      pending_names.clear();
      const auto found = names.find(target);
      if (found == names.end()) return std::nullopt;
      settle(files[found->second]);
      return files[found->second].durable;
    }

    Disk lose_power(std::mt19937& random) const {
      Disk left = *this;
      left.pending_names.resize(random() % (pending_names.size() + 1));
      for (auto& [inode, file] : left.files) {
        std::vector<Step> pending;
        // All, none, or each sector by chance; and in any order.
        const uint32_t keep = random() % 4;
        for (const Step& step : file.pending) {
          if (keep == 0) break;
          if (step.kind == Step::Kind::truncate) {
            if (keep == 1 || random() % 2 == 0) pending.push_back(step);
            continue;
          }
          for (uint64_t at = 0; at < step.bytes.size();) {
            const uint64_t n =
                std::min(kSector - (step.offset + at) % kSector, step.bytes.size() - at);
            Step sector{Step::Kind::write, inode, step.offset + at};
            const auto from = step.bytes.begin() + static_cast<ptrdiff_t>(at);
            sector.bytes.assign(from, from + static_cast<ptrdiff_t>(n));
            if (keep == 1 || random() % keep == 0) pending.push_back(std::move(sector));
            at += n;
          }
        }
        if (keep == 3) std::shuffle(pending.begin(), pending.end(), random);
        file.pending = std::move(pending);
      }
      return left;
    }
  };

  bool broken() {
    const bool is = fail_at >= 0 && steps.size() >= static_cast<size_t>(fail_at);
    if (is) errno = EIO;
    return is;
  }
  void add(Step step) {
    const std::lock_guard lock(mutex_);
    steps.push_back(std::move(step));
  }
  int created(int fd, const std::string& name) {
    if (fd < 0) return fd;
    Step step{Step::Kind::create, inode(fd)};
    step.name = name;
    add(std::move(step));
    kept_.push_back(dup(fd));  // no inode number is used twice
    return fd;
  }
  int synced(int fd) {
    if (broken()) return -1;
    const bool fails = steps.size() == static_cast<size_t>(fail_sync_at);
    add({fails ? Step::Kind::lose : Step::Kind::sync, inode(fd)});
    if (!fails) return 0;  // the real disk may take its time
    errno = EIO;
    return -1;
  }
  static ino_t inode(int fd) {
    struct stat info{};
    fstat(fd, &info);
    return info.st_ino;
  }

  std::mutex mutex_;
  std::vector<int> kept_;

 public:
  ~PowerCut() override {
    for (int fd : kept_) ::close(fd);
  }
};

}  // namespace tensorizer::tests
