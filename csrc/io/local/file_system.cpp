#include "io/local/file_system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>

#include "io/local/file_calls.h"

namespace tensorizer::io {
namespace {

// Devices on which everything is possible, so that each is tried once. Without a lock, which a
// forked child could find taken; beyond so many they are tried every time.
constinit std::array<std::atomic<dev_t>, 64> known_devices{};

bool is_known(dev_t device) noexcept {
  return std::ranges::any_of(known_devices,
                             [&](const std::atomic<dev_t>& known) { return known == device; });
}

void make_known(dev_t device) noexcept {
  for (std::atomic<dev_t>& known : known_devices) {
    dev_t none = 0;
    if (known.compare_exchange_strong(none, device) || none == device) return;
  }
}

// A write behind a hole; a driver that takes bytes from front to back refuses it.
bool takes_any_order(int fd) noexcept {
  constexpr uint64_t kBehindAHole = 4096;
  std::byte one{};
  const iovec vector{&one, 1};
  if (FileCalls::system().write(fd, &vector, 1, kBehindAHole) == 1) return true;
  return errno != EINVAL && errno != ESPIPE && errno != EOPNOTSUPP && errno != ENOSYS &&
         errno != EPERM;
}

std::string probe_name(const std::string& folder) {
  std::random_device device;
  char name[48];
  std::snprintf(name, sizeof name, "/.tensorizer.%08x%08x.tmp", device(), device());
  return folder + name;
}

// By a file that is made and removed. The write comes first: where it is refused, mounts of object
// stores store nothing of the file.
FolderTraits try_folder(const std::string& folder) {
  FolderTraits traits;
  std::string name = probe_name(folder);
  UniqueFd fd(::open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (!fd) return traits;
  traits.any_order = takes_any_order(fd.get());
  if (traits.any_order) {
    const std::string other = probe_name(folder);
    if (::rename(name.c_str(), other.c_str()) == 0) {
      name = other;
    } else {
      traits.renames = !gives_no_names(errno);
    }
  }
  fd.reset();
  ::unlink(name.c_str());
  return traits;
}

}  // namespace

bool is_mount_point(const std::string& path) noexcept {
  constexpr uint64_t kMountRoot = 0x2000;  // STATX_ATTR_MOUNT_ROOT, since Linux 5.8
  struct statx found{};
  return statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_TYPE, &found) ==
             0 &&
         (found.stx_attributes_mask & kMountRoot) != 0 && (found.stx_attributes & kMountRoot) != 0;
}

bool gives_no_names(int err) noexcept {
  return err == EBUSY || err == ENOSYS || err == EOPNOTSUPP || err == EPERM || err == EACCES ||
         err == EINVAL || err == EXDEV || err == EMLINK;
}

FolderTraits folder_traits(const std::string& folder) {
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat info{};
  if (!fd || fstat(fd.get(), &info) != 0) return {};
  if (is_known(info.st_dev)) return {};
  const char* const kind = network_file_system(fd.get());
  FolderTraits traits;
  if (kind == nullptr || std::string_view(kind) == "FUSE" || std::string_view(kind) == "unknown") {
    if (const UniqueFd unnamed(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
        unnamed) {
      traits.any_order = takes_any_order(unnamed.get());
    } else {
      traits = try_folder(folder);
    }
  }
  // A file that is written from front to back appears when it is closed, and gets another name by a
  // copy, if at all.
  traits.renames = traits.renames && traits.any_order;
  if (traits.renames) make_known(info.st_dev);
  return traits;
}

// Values of statfs.f_type, from linux/magic.h and the file systems' own headers.
const char* network_file_system(int fd) noexcept {
  struct statfs found{};
  if (fstatfs(fd, &found) != 0) return "unknown";
  switch (static_cast<uint32_t>(found.f_type)) {
    case 0x00006969:
      return "NFS";
    case 0x0000517B:
    case 0xFF534D42:
    case 0xFE534D42:
      return "SMB";
    case 0x65735546:
      return "FUSE";
    case 0x00C36400:
      return "Ceph";
    case 0x0BD00BD0:
      return "Lustre";
    case 0x01021997:
      return "9p";
    case 0x6A656A63:  // where it has a number of its own
      return "virtiofs";
    case 0x5346414F:
    case 0x6B414653:
      return "AFS";
    case 0x47504653:
      return "GPFS";
    case 0x19830326:
      return "BeeGFS";
    case 0x7461636F:
      return "OCFS2";
    case 0x01161970:
      return "GFS2";
    default:
      return nullptr;
  }
}

bool is_in_memory(int fd) noexcept {
  constexpr uint32_t kTmpfs = 0x01021994;
  struct statfs found{};
  return fstatfs(fd, &found) == 0 && static_cast<uint32_t>(found.f_type) == kTmpfs;
}

UniqueFd open_again(int fd, int flags) {
  return UniqueFd(
      ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC | flags));
}

}  // namespace tensorizer::io
