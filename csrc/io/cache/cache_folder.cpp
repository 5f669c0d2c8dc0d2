#include "io/cache/cache_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <functional>
#include <map>
#include <thread>

#include "core/error.h"
#include "io/local/file_system.h"

namespace tensorizer::io {
namespace {

constexpr char kLayout[] = "tensorizer-1";
constexpr size_t kNameLength = 32;
constexpr std::time_t kLeftOverSeconds = 3600;
constexpr int kLockTries = 200;  // of 5 ms
constexpr uint64_t kAboutLimit = 64 << 10;

UniqueFd open_folder(int parent, const std::string& name) {
  return UniqueFd(openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// Why a folder below the cache's own is not to be trusted; empty: it is.
std::string distrust(int fd, bool may_be_shared) {
  struct stat found{};
  if (fstat(fd, &found) != 0) return "cannot be examined";
  const bool writable = (found.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  // As in /tmp, where users cannot replace files of other users.
  if (may_be_shared && (found.st_mode & S_ISVTX) != 0) return "";
  if (found.st_uid != geteuid()) return "belongs to another user";
  return writable ? "can be written by others" : "";
}

// A folder below `parent`, made where it is missing. Its mode does not depend on the umask.
UniqueFd enter(int parent, const std::string& name, const std::string& shown, bool create,
               mode_t mode) {
  UniqueFd fd = open_folder(parent, name);
  if (!fd && errno == ENOENT && create) {
    const bool made = mkdirat(parent, name.c_str(), 0700) == 0;
    if (!made && errno != EEXIST) throw_errno("cannot make", shown, errno);
    fd = open_folder(parent, name);
    if (made && (!fd || fchmod(fd.get(), mode) != 0)) {  // a umask may take the user's own rights
      const int error = errno;
      unlinkat(parent, name.c_str(), AT_REMOVEDIR);
      throw_errno("cannot make", shown, error);
    }
  }
  if (!fd && errno == ENOENT) throw Error(Errc::not_found, shown + " does not exist", shown);
  if (!fd && (errno == ELOOP || errno == ENOTDIR))
    throw Error(Errc::io, shown + " is a symbolic link, or no folder", shown);
  if (!fd) throw_errno("cannot open", shown, errno);
  const std::string why = distrust(fd.get(), mode == 01777);
  if (!why.empty()) throw Error(Errc::io, shown + " " + why, shown);
  return fd;
}

// Of a folder whose position is at its beginning. Without a DIR: folders of one entry are many.
std::vector<std::string> read_names(int folder) {
  std::vector<std::string> names;
  alignas(dirent64) std::array<char, 32 << 10> bytes;
  for (long got; (got = syscall(SYS_getdents64, folder, bytes.data(), bytes.size())) > 0;) {
    for (const char* at = bytes.data(); at < bytes.data() + got;) {
      const auto* const found = reinterpret_cast<const dirent64*>(at);
      if (const std::string_view name = found->d_name; name != "." && name != "..")
        names.emplace_back(name);
      at += found->d_reclen;
    }
  }
  return names;
}

std::vector<std::string> names_in(int folder) {
  const UniqueFd again(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return read_names(again.get());
}

bool is_entry_name(const std::string& name) noexcept {
  return name.size() == kNameLength && name.find_first_not_of("0123456789abcdef") == name.npos;
}

std::string temporary_name(const char* prefix) {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number)
    throw_errno("cannot choose", "a name", errno);
  std::string name(16, '0');
  for (char& c : name) {
    c = "0123456789abcdef"[number & 15];
    number >>= 4;
  }
  return prefix + name;
}

void delete_folder(int parent, const std::string& name) noexcept {
  try {
    if (const UniqueFd fd = open_folder(parent, name))
      for (const std::string& file : read_names(fd.get())) unlinkat(fd.get(), file.c_str(), 0);
  } catch (const std::exception&) {  // no memory: a later sweep
  }
  unlinkat(parent, name.c_str(), AT_REMOVEDIR);
}

std::string read_small(int folder, const char* name) {
  const UniqueFd fd(openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  std::string text(kAboutLimit, '\0');
  const ssize_t got = fd ? pread(fd.get(), text.data(), text.size(), 0) : 0;
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

// flock() of the user's lock file, until it is destroyed.
class UserLock {
 public:
  explicit UserLock(int user)
      : fd_(openat(user, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600)) {
    if (!fd_ || fchmod(fd_.get(), 0600) != 0) throw_errno("cannot open", "lock", errno);
    // Not without end: the process that holds it may be stopped.
    for (int tries = 0; flock(fd_.get(), LOCK_EX | LOCK_NB) != 0; ++tries) {
      if (errno != EWOULDBLOCK && errno != EINTR) throw_errno("cannot lock", "lock", errno);
      if (tries == kLockTries) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    is_held_ = true;
  }
  // By a call: a child that was forked meanwhile has the descriptor, too.
  ~UserLock() {
    if (is_held_) flock(fd_.get(), LOCK_UN);
  }
  UserLock(const UserLock&) = delete;
  UserLock& operator=(const UserLock&) = delete;

  bool is_held() const noexcept { return is_held_; }

 private:
  const UniqueFd fd_;
  bool is_held_ = false;
};

}  // namespace

std::shared_ptr<CacheFolder> CacheFolder::open(const std::string& path, bool create) {
  std::shared_ptr<CacheFolder> folder(new CacheFolder(path));
  const UniqueFd root(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!root && errno == ENOENT) throw Error(Errc::not_found, path + " does not exist", path);
  if (!root) throw_errno("cannot open", path, errno);
  if (const char* kind = network_file_system(root.get()))
    throw Error(Errc::io,
                path + " is on a network file system (" + kind +
                    "), where other machines may see what is not there yet",
                path);
  struct stat found{};
  if (fstat(root.get(), &found) != 0) throw_errno("cannot examine", path, errno);
  // Where users share the folder, they share the one of the layout, too.
  const bool shared = (found.st_mode & S_IWOTH) != 0;
  const std::string layout = path + "/" + kLayout;
  const UniqueFd of_layout =
      enter(root.get(), kLayout, layout, create, shared ? mode_t{01777} : mode_t{0700});
  const std::string user = std::to_string(geteuid());
  folder->user_ = enter(of_layout.get(), user, layout + "/" + user, create, 0700);
  return folder;
}

std::pair<uint64_t, uint64_t> CacheFolder::disk_nbytes() const {
  struct statvfs found{};
  if (fstatvfs(user_.get(), &found) != 0) throw_errno("cannot examine", path_, errno);
  return {uint64_t{found.f_blocks} * found.f_frsize, uint64_t{found.f_bavail} * found.f_frsize};
}

std::string CacheFolder::path_of(const CachedVersion& version) const {
  return path_ + "/" + kLayout + "/" + std::to_string(geteuid()) + "/" + version.location + "/" +
         version.version;
}

UniqueFd CacheFolder::open_version(const std::string& location, const std::string& version) const {
  const std::string shown = path_of({location, version});
  try {
    const UniqueFd parent = enter(user_.get(), location, shown, false, 0700);
    return enter(parent.get(), version, shown, false, 0700);
  } catch (const Error& error) {
    if (error.code() != Errc::not_found) throw;
    return {};
  }
}

std::vector<std::pair<std::string, std::string>> CacheFolder::versions(
    const std::string& location) const {
  std::vector<std::pair<std::string, std::string>> found;
  const UniqueFd parent = open_folder(user_.get(), location);
  if (!parent) return found;
  for (const std::string& name : read_names(parent.get())) {
    if (!is_entry_name(name)) continue;
    const UniqueFd fd = open_folder(parent.get(), name);
    if (fd && faccessat(fd.get(), "data", F_OK, AT_SYMLINK_NOFOLLOW) == 0)
      found.emplace_back(name, read_small(fd.get(), "about.json"));
  }
  return found;
}

std::shared_ptr<CacheEntry> CacheFolder::open_entry(const std::string& location,
                                                    const std::string& version, uint64_t nbytes) {
  UniqueFd fd = open_version(location, version);
  if (!fd) return nullptr;
  struct stat before{};
  if (fstat(fd.get(), &before) != 0) return nullptr;
  std::shared_ptr<CacheEntry> entry = CacheEntry::open(std::move(fd), nbytes);
  if (!entry) {
    remove(location, version, false);
    return nullptr;
  }
  // It may have been removed, and made again, until it was marked as used.
  struct stat now{};
  const std::string name = location + "/" + version;
  if (fstatat(user_.get(), name.c_str(), &now, AT_SYMLINK_NOFOLLOW) != 0 ||
      now.st_ino != before.st_ino)
    return nullptr;
  return entry;
}

std::shared_ptr<CacheEntry> CacheFolder::make_entry(const std::string& location,
                                                    const std::string& version, uint64_t nbytes,
                                                    const std::string& about) {
  for (int tries = 0; tries < 4; ++tries) {
    if (auto entry = open_entry(location, version, nbytes)) return entry;
    const std::string fresh = temporary_name(".new-");
    try {
      const UniqueFd fd = enter(user_.get(), fresh, path_ + "/" + fresh, true, 0700);
      CacheEntry::create_files(fd.get(), about);
      const std::string name = location + "/" + version;
      // The removal of the last version removes the folder of the location, too.
      for (int again = 0; again < 4; ++again) {
        enter(user_.get(), location, path_ + "/" + location, true, 0700);
        if (renameat(user_.get(), fresh.c_str(), user_.get(), name.c_str()) == 0) break;
        if (errno != ENOENT) {
          delete_folder(user_.get(), fresh);  // another process was faster
          break;
        }
      }
    } catch (...) {
      delete_folder(user_.get(), fresh);
      throw;
    }
  }
  return nullptr;
}

bool CacheFolder::remove(const std::string& location, const std::string& version, bool force) {
  const UniqueFd parent = open_folder(user_.get(), location);
  const UniqueFd fd = parent ? open_folder(parent.get(), version) : UniqueFd();
  if (!fd) return true;
  const UniqueFd lock(openat(fd.get(), "lock", O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!force && lock && !CacheEntry::take_for_removal(lock.get())) return false;
  const std::string gone = temporary_name(".del-");
  if (renameat(parent.get(), version.c_str(), user_.get(), gone.c_str()) == 0)
    delete_folder(user_.get(), gone);
  unlinkat(user_.get(), location.c_str(), AT_REMOVEDIR);  // if it is empty now
  return true;
}

std::vector<CachedVersion> CacheFolder::scan() const {
  std::vector<CachedVersion> found;
  const auto now = static_cast<int64_t>(std::time(nullptr)) * 1'000'000'000;
  for (const std::string& location : names_in(user_.get())) {
    const UniqueFd parent =
        is_entry_name(location) ? open_folder(user_.get(), location) : UniqueFd();
    if (!parent) continue;
    std::optional<size_t> newest;
    for (const std::string& version : read_names(parent.get())) {
      if (!is_entry_name(version)) continue;
      const auto look = [&](const char* name) {
        struct stat file{};
        const bool is_there =
            fstatat(parent.get(), (version + name).c_str(), &file, AT_SYMLINK_NOFOLLOW) == 0;
        return is_there ? file : decltype(file){};
      };
      const auto data = look("/data"), about = look("/about.json");
      if (data.st_nlink == 0) continue;  // it is being made
      const auto nbytes = static_cast<uint64_t>(data.st_size);
      const auto used = int64_t{about.st_mtim.tv_sec} * 1'000'000'000 + about.st_mtim.tv_nsec;
      found.push_back({location, version, nbytes, static_cast<uint64_t>(data.st_blocks) * 512,
                       std::min(used, now + 1'000'000'000), false});
      if (!newest || found[*newest].used <= found.back().used) newest = found.size() - 1;
    }
    if (newest) found[*newest].newest = true;
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::pair(a.newest, a.used) < std::pair(b.newest, b.used);
  });
  return found;
}

bool CacheFolder::is_used(const CachedVersion& version) const {
  const UniqueFd fd = open_folder(user_.get(), version.location + "/" + version.version);
  return fd && CacheEntry::is_used(fd.get());
}

bool CacheFolder::has_copy(const std::string& location, const std::string& version,
                           uint64_t nbytes) const {
  const UniqueFd fd = open_folder(user_.get(), location + "/" + version);
  return fd && CacheEntry::has_copy(fd.get(), nbytes);
}

bool CacheFolder::make_room(uint64_t nbytes, const CacheLimits& limits) {
  const UserLock lock(user_.get());
  if (!lock.is_held()) return false;
  sweep();
  uint64_t used = 0;
  const auto fits = [&](uint64_t removed) {
    return (!limits.max_nbytes || used - removed + nbytes <= *limits.max_nbytes) &&
           (limits.min_free_nbytes == 0 ||
            disk_nbytes().second + removed >= limits.min_free_nbytes + nbytes);
  };
  if (!limits.max_nbytes && fits(0)) return true;
  std::vector<CachedVersion> entries = scan();
  for (const CachedVersion& entry : entries) used += entry.disk_nbytes;
  if (fits(0)) return true;
  std::erase_if(entries, [&](const CachedVersion& entry) { return is_used(entry); });
  uint64_t removable = 0;
  for (const CachedVersion& entry : entries) removable += entry.disk_nbytes;
  if (!fits(removable)) return false;  // nothing goes in vain
  for (const CachedVersion& entry : entries) {
    if (remove(entry.location, entry.version, false)) used -= entry.disk_nbytes;
    if (fits(0)) return true;
  }
  return false;
}

void CacheFolder::sweep() {
  for (const std::string& name : names_in(user_.get())) {
    if (is_entry_name(name)) sweep_location(name);
    const bool left = name.size() == 21 && (name.starts_with(".new-") || name.starts_with(".del-"));
    struct stat found{};
    if (!left || fstatat(user_.get(), name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (std::time(nullptr) - found.st_mtim.tv_sec > kLeftOverSeconds)
      delete_folder(user_.get(), name);
  }
}

// What a process was making when it was killed.
void CacheFolder::sweep_location(const std::string& location) {
  const UniqueFd parent = open_folder(user_.get(), location);
  if (!parent) return;
  for (const std::string& version : read_names(parent.get())) {
    struct stat found{};
    if (!is_entry_name(version) ||
        fstatat(parent.get(), (version + "/data").c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0 ||
        fstatat(parent.get(), (version + "/lock").c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0)
      continue;
    if (std::time(nullptr) - found.st_mtim.tv_sec > kLeftOverSeconds)
      remove(location, version, /*force=*/false);
  }
}

}  // namespace tensorizer::io
