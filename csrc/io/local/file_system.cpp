#include "io/local/file_system.h"

#include <fcntl.h>
#include <sys/vfs.h>

#include <cstdint>
#include <string>

namespace tensorizer::io {

// Values of statfs.f_type, from the kernel's linux/magic.h and the file systems' own headers.
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
