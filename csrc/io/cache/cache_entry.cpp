#include "io/cache/cache_entry.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>
#include <vector>

#include "core/checked_math.h"
#include "core/endian.h"
#include "core/error.h"

namespace tensorizer::io {
namespace {

constexpr char kMagic[] = "TZRCMAP1";
constexpr size_t kBootAt = 24;
constexpr size_t kBootNbytes = 36;
// Bytes of `map` that are locked, none of which is read or written for it.
constexpr off_t kUseLock = 0;
constexpr off_t kBootLock = 1;
constexpr off_t kClaims = off_t{1} << 40;
constexpr int kBootTries = 200;                   // of 5 ms
constexpr size_t kWriteNbytes = size_t{2} << 20;  // after which others see what is there

size_t bits_nbytes(uint64_t nbytes) noexcept {
  return static_cast<size_t>(ceil_div(CacheEntry::blocks_of(nbytes), 8));
}

struct flock lock_of(short type, off_t begin, off_t nbytes) noexcept {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = begin;
  range.l_len = nbytes;
  return range;
}

// 0, or errno. A lock belongs to the open file description and ends with it.
int lock(int fd, short type, off_t begin, off_t nbytes) noexcept {
  struct flock range = lock_of(type, begin, nbytes);
  while (fcntl(fd, F_OFD_SETLK, &range) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

bool is_conflict(int error) noexcept { return error == EAGAIN || error == EACCES; }

// Where a lock of somebody else begins and ends that is in the way; nullopt: there is none now.
std::optional<std::pair<off_t, off_t>> obstacle(int fd, off_t begin, off_t nbytes) noexcept {
  struct flock range = lock_of(F_WRLCK, begin, nbytes);
  if (fcntl(fd, F_OFD_GETLK, &range) != 0 || range.l_type == F_UNLCK) return std::nullopt;
  return std::pair(range.l_start, range.l_len == 0 ? begin + nbytes : range.l_start + range.l_len);
}

// Of this boot of the machine; zeros where the system does not say.
std::string boot_id() {
  std::string id(kBootNbytes, '\0');
  const UniqueFd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!file || read(file.get(), id.data(), id.size()) != static_cast<ssize_t>(kBootNbytes))
    std::fill(id.begin(), id.end(), '\0');
  return id;
}

UniqueFd open_file(int folder, const char* name, int flags) {
  // Whatever lies there, nobody waits for its other end.
  return UniqueFd(openat(folder, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
}

UniqueFd make_file(int folder, const char* name) {
  UniqueFd fd = open_file(folder, name, O_RDWR | O_CREAT | O_EXCL);
  if (!fd || fchmod(fd.get(), 0600) != 0) throw_errno("cannot make", name, errno);
  return fd;
}

void write_all(int fd, const char* name, const std::string& content) {
  for (size_t done = 0; done < content.size();) {
    const ssize_t n = write(fd, content.data() + done, content.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw_errno("cannot write", name, n == 0 ? ENOSPC : errno);
    done += static_cast<size_t>(n);
  }
}

std::string head_of(uint64_t nbytes, const std::string& boot) {
  std::string head(kCacheHeadNbytes, '\0');
  auto* const bytes = reinterpret_cast<std::byte*>(head.data());
  std::memcpy(bytes, kMagic, 8);
  store_le<uint64_t>(bytes + 8, nbytes);
  store_le<uint32_t>(bytes + 16, static_cast<uint32_t>(kCacheBlockNbytes));
  std::memcpy(bytes + kBootAt, boot.data(), kBootNbytes);
  return head;
}

bool is_own_regular_file(int fd, uint64_t nbytes) noexcept {
  struct stat found{};
  return fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
         (found.st_mode & (S_IWGRP | S_IWOTH)) == 0 &&
         static_cast<uint64_t>(found.st_size) == nbytes;
}

uint64_t count_present(const std::atomic<uint8_t>* bits, uint64_t nbytes) noexcept {
  uint64_t blocks = 0;
  for (size_t i = 0; i < bits_nbytes(nbytes); ++i)
    blocks += static_cast<uint64_t>(std::popcount(bits[i].load(std::memory_order_acquire)));
  const uint64_t last = CacheEntry::blocks_of(nbytes) - 1;
  if (nbytes == 0 || blocks == 0) return 0;
  const bool has_last = ((bits[last / 8].load(std::memory_order_acquire) >> (last % 8)) & 1) != 0;
  return blocks * kCacheBlockNbytes - (has_last ? (last + 1) * kCacheBlockNbytes - nbytes : 0);
}

}  // namespace

uint64_t CacheEntry::blocks_of(uint64_t nbytes) noexcept {
  return ceil_div(nbytes, kCacheBlockNbytes);
}

uint64_t CacheEntry::map_nbytes_of(uint64_t nbytes) noexcept {
  return kCacheHeadNbytes + 2 * bits_nbytes(nbytes);
}

void CacheEntry::create_files(int folder, uint64_t nbytes, const std::string& about) {
  const UniqueFd data = make_file(folder, "data");
  if (ftruncate(data.get(), static_cast<off_t>(nbytes)) != 0)
    throw_errno("cannot size", "data", errno);
  // Written, not sparse: a mapping whose page finds no room on the disk would end the process.
  const UniqueFd map = make_file(folder, "map");
  write_all(map.get(), "map",
            head_of(nbytes, boot_id()) + std::string(2 * bits_nbytes(nbytes), '\0'));
  write_all(make_file(folder, "about.json").get(), "about.json", about);
}

bool CacheEntry::is_used(int folder) noexcept {
  const UniqueFd map = open_file(folder, "map", O_RDWR);
  return map && obstacle(map.get(), kUseLock, 1).has_value();
}

bool CacheEntry::take_for_removal(int map) noexcept { return lock(map, F_WRLCK, kUseLock, 1) == 0; }

uint64_t CacheEntry::present_nbytes_of(int folder, uint64_t nbytes) {
  const UniqueFd data = open_file(folder, "data", O_RDONLY);
  const UniqueFd map = open_file(folder, "map", O_RDONLY);
  const uint64_t wanted = map_nbytes_of(nbytes);
  if (!data || !is_own_regular_file(data.get(), nbytes) || !map ||
      !is_own_regular_file(map.get(), wanted))
    return 0;
  std::vector<std::byte> bytes(static_cast<size_t>(wanted));
  const std::string head = head_of(nbytes, boot_id());
  if (pread(map.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(wanted) ||
      std::memcmp(bytes.data(), head.data(), kBootAt) != 0)
    return 0;
  const bool is_of_this_boot = std::memcmp(bytes.data(), head.data(), head.size()) == 0;
  const size_t bits = kCacheHeadNbytes + (is_of_this_boot ? 0 : bits_nbytes(nbytes));
  return count_present(reinterpret_cast<const std::atomic<uint8_t>*>(bytes.data() + bits), nbytes);
}

std::shared_ptr<CacheEntry> CacheEntry::open(UniqueFd folder, uint64_t nbytes, FileCalls& calls) {
  std::shared_ptr<CacheEntry> entry(new CacheEntry(calls));
  entry->process_ = getpid();
  entry->nbytes_ = nbytes;
  const auto open_here = [&](const char* name) {
    UniqueFd fd = open_file(folder.get(), name, O_RDWR);
    // It may be all right where it cannot be opened, and is not to be removed.
    if (!fd && errno != ENOENT && errno != ELOOP) throw_errno("cannot open", name, errno);
    return fd;
  };
  entry->data_ = open_here("data");
  entry->map_ = open_here("map");
  entry->folder_ = std::move(folder);
  if (!entry->data_ || !entry->map_ || !is_own_regular_file(entry->data(), nbytes)) return nullptr;
  if (const int error = lock(entry->map_.get(), F_RDLCK, kUseLock, 1); error != 0) {
    if (is_conflict(error)) return nullptr;
    throw_errno("cannot lock", "map", error);
  }
  return entry->take_map(nbytes) ? entry : nullptr;
}

bool CacheEntry::take_map(uint64_t nbytes) {
  map_nbytes_ = map_nbytes_of(nbytes);
  if (!is_own_regular_file(map_.get(), map_nbytes_)) return false;
  void* const address =
      mmap(nullptr, map_nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, map_.get(), 0);
  if (address == MAP_FAILED) throw_errno("cannot map", "map", errno);
  bytes_ = static_cast<std::byte*>(address);
  const std::string head = head_of(nbytes, std::string(kBootNbytes, '\0'));
  if (std::memcmp(bytes_, head.data(), kBootAt) != 0) return false;
  return renew_boot(boot_id());
}

// What the page cache of an earlier boot held is gone, whatever the bits say.
bool CacheEntry::renew_boot(const std::string& boot) {
  const auto is_of_this_boot = [&] {
    return std::memcmp(bytes_ + kBootAt, boot.data(), kBootNbytes) == 0;
  };
  if (is_of_this_boot()) return true;
  for (int tries = 0; lock(map_.get(), F_WRLCK, kBootLock, 1) != 0; ++tries) {
    if (tries == kBootTries) return false;
    wait(std::chrono::milliseconds(5), {});
  }
  if (!is_of_this_boot()) {
    for (size_t i = 0; i < bits_nbytes(nbytes_); ++i) present()[i].store(durable()[i].load());
    std::memcpy(bytes_ + kBootAt, boot.data(), kBootNbytes);
  }
  lock(map_.get(), F_UNLCK, kBootLock, 1);
  return true;
}

CacheEntry::~CacheEntry() {
  if (bytes_ != nullptr) munmap(bytes_, map_nbytes_);
}

bool CacheEntry::belongs_to_this_process() const noexcept { return getpid() == process_; }

std::atomic<uint8_t>* CacheEntry::present() const noexcept {
  static_assert(sizeof(std::atomic<uint8_t>) == 1 && std::atomic<uint8_t>::is_always_lock_free);
  return reinterpret_cast<std::atomic<uint8_t>*>(bytes_ + kCacheHeadNbytes);
}

std::atomic<uint8_t>* CacheEntry::durable() const noexcept {
  return present() + bits_nbytes(nbytes_);
}

bool CacheEntry::is_present(uint64_t block) const noexcept {
  return ((present()[block / 8].load(std::memory_order_acquire) >> (block % 8)) & 1) != 0;
}

CacheEntry::Same CacheEntry::first_same(BlockRun run) const noexcept {
  Same same{{run.begin, run.begin + 1}, is_present(run.begin)};
  while (same.run.end < run.end && is_present(same.run.end) == same.present) ++same.run.end;
  return same;
}

bool CacheEntry::has(BlockRun run) const noexcept {
  const Same same = first_same(run);
  return same.present && same.run.end == run.end;
}

int CacheEntry::write(BlockRun run, ConstSlice bytes, uint64_t& end) noexcept {
  const uint64_t begin = run.begin * kCacheBlockNbytes;
  uint64_t done = 0;
  end = run.begin;
  while (done < bytes.size()) {
    const ConstSlice rest = bytes.subspan(static_cast<size_t>(done));
    const iovec vector{const_cast<std::byte*>(rest.data()), std::min(rest.size(), kWriteNbytes)};
    const ssize_t n = calls_.write(data(), &vector, 1, begin + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n == 0 ? ENOSPC : errno;
    done += static_cast<uint64_t>(n);
    const uint64_t written = done == bytes.size() ? run.end : run.begin + done / kCacheBlockNbytes;
    for (; end < written; ++end)
      present()[end / 8].fetch_or(static_cast<uint8_t>(1U << (end % 8)), std::memory_order_release);
    unsynced_ = true;
  }
  calls_.push(data(), begin, done);
  return 0;
}

uint64_t CacheEntry::present_nbytes() const noexcept { return count_present(present(), nbytes_); }

void CacheEntry::write_about(const std::string& about) noexcept {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number) return;
  const std::string name = ".about-" + std::to_string(number);
  try {
    write_all(make_file(folder_.get(), name.c_str()).get(), name.c_str(), about);
    if (renameat(folder_.get(), name.c_str(), folder_.get(), "about.json") == 0) return;
  } catch (const std::exception&) {
  }
  unlinkat(folder_.get(), name.c_str(), 0);
}

void CacheEntry::touch() noexcept {
  struct stat found{};
  if (fstatat(folder_.get(), "about.json", &found, AT_SYMLINK_NOFOLLOW) != 0) return;
  const std::time_t age = std::time(nullptr) - found.st_mtim.tv_sec;
  if (age < 0 || age >= 60) utimensat(folder_.get(), "about.json", nullptr, AT_SYMLINK_NOFOLLOW);
}

CacheEntry::Claimed CacheEntry::claim(BlockRun run) {
  MutexLock guard(mutex_);
  auto next = claims_.upper_bound(run.begin);
  if (next != claims_.begin() && std::prev(next)->second > run.begin)
    return {Owner::threads, {run.begin, std::min(run.end, std::prev(next)->second)}, {}};
  if (next != claims_.end()) run.end = std::min(run.end, next->first);
  // What is in the way may begin later, and may be gone by the time that it is looked at.
  for (int tries = 0; tries < 8; ++tries) {
    const off_t at = kClaims + static_cast<off_t>(run.begin);
    const auto count = static_cast<off_t>(run.end - run.begin);
    const int error = lock(map_.get(), F_WRLCK, at, count);
    if (error == 0) {
      claims_.emplace(run.begin, run.end);
      return {Owner::caller, run, {shared_from_this(), run}};
    }
    if (!is_conflict(error)) throw_errno("cannot lock", "map", error);
    const auto other = obstacle(map_.get(), at, count);
    if (!other) continue;
    if (other->first <= at) {
      const auto end = static_cast<uint64_t>(std::max(other->second, at + 1) - kClaims);
      return {Owner::processes, {run.begin, std::min(run.end, end)}, {}};
    }
    run.end = static_cast<uint64_t>(other->first - kClaims);
  }
  return {Owner::processes, {run.begin, run.begin + 1}, {}};
}

void CacheEntry::release(BlockRun run) noexcept {
  {
    MutexLock guard(mutex_);
    claims_.erase(run.begin);
    lock(map_.get(), F_UNLCK, kClaims + static_cast<off_t>(run.begin),
         static_cast<off_t>(run.end - run.begin));
  }
  wake();
}

void CacheEntry::wake() noexcept {
  {
    MutexLock guard(mutex_);
    ++wakes_;
  }
  changed_.notify_all();
}

void CacheEntry::wait(std::chrono::milliseconds time, const std::stop_token& stop) {
  MutexLock guard(mutex_);
  const uint64_t before = wakes_;
  changed_.wait_until(mutex_, stop, std::chrono::steady_clock::now() + time,
                      [&]() REQUIRES_LOCK(mutex_) { return wakes_ != before; });
}

int CacheEntry::make_durable() noexcept {
  try {
    std::vector<uint8_t> written(bits_nbytes(nbytes_));
    for (size_t i = 0; i < written.size(); ++i)
      written[i] = present()[i].load(std::memory_order_acquire);
    if (calls_.sync_data(data()) != 0) {
      const int error = errno;
      for (size_t i = 0; i < written.size(); ++i)
        present()[i].fetch_and(durable()[i].load(), std::memory_order_release);
      return error;
    }
    for (size_t i = 0; i < written.size(); ++i)
      durable()[i].fetch_or(written[i], std::memory_order_release);
  } catch (const std::bad_alloc&) {  // another time
  }
  return 0;
}

bool CacheEntry::take_unsynced() noexcept {
  if (!unsynced_.exchange(false)) return false;
  for (size_t i = 0; i < bits_nbytes(nbytes_); ++i)
    if (present()[i].load() != durable()[i].load()) return true;
  return false;
}

// Explicitly: the mapping keeps the description open.
void CacheEntry::leave() noexcept { lock(map_.get(), F_UNLCK, kUseLock, 1); }

}  // namespace tensorizer::io
