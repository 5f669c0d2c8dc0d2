// What a network source gives at most: plain sockets and ranged requests into huge-page memory.
// usage: limits_net WHAT CONNECTIONS < TARGET      prints {"seconds": ...}
//   http   TARGET is "HOST PORT PATH NBYTES": each connection asks for its share of the object once
//   redis  TARGET is "HOST PORT", then one "KEY NBYTES" per line: GETRANGE of 1 MiB at a time,
//          several under way on each connection
// The clock covers connecting, asking, and receiving every byte into fresh memory: a loader cannot
// have its tensors' memory before it knows them. With "-resident" behind WHAT the memory is there
// already.
// TARGET is no argument because a presigned path is nobody's business who lists processes.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

constexpr size_t kHugePageBytes = 2u << 20;
constexpr size_t kPieceBytes = 1u << 20;
constexpr size_t kPipelined = 4;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "limits_net: %s\n", what.c_str());
  std::exit(1);
}

[[noreturn]] void fail_errno(const char* what) {
  fail(std::string(what) + ": " + std::strerror(errno));
}

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Anonymous memory in huge pages, never given back: the process ends after one measurement.
char* huge_memory(size_t nbytes) {
  const size_t mapped = round_up(nbytes, kHugePageBytes) + kHugePageBytes;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) fail_errno("mmap");
  char* data = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(base), kHugePageBytes));
  madvise(data, mapped - kHugePageBytes, MADV_HUGEPAGE);
  return data;
}

// On virtual machines freed memory may have gone back to the host; getting it again is no property
// of the network.
void fault_in_and_free(size_t nbytes) {
  char* data = huge_memory(nbytes);
  std::memset(data, 1, nbytes);
  munmap(data, nbytes);
}

class Connection {
 public:
  Connection(const std::string& host, const std::string& port)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (fd_ < 0) fail_errno("socket");
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(std::stoul(port)));
    if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) fail("not an address: " + host);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      fail_errno("connect");
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send_all(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t put = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (put <= 0) fail_errno("send");
      bytes.remove_prefix(static_cast<size_t>(put));
    }
  }

  // The bytes up to and with `end`; what came behind them waits for take().
  std::string read_until(std::string_view end) {
    size_t at;
    while ((at = left_.find(end)) == std::string::npos) {
      char block[4096];
      const ssize_t got = recv(fd_, block, sizeof block, 0);
      if (got <= 0) fail("the server ended the connection within a head");
      left_.append(block, static_cast<size_t>(got));
    }
    std::string head = left_.substr(0, at + end.size());
    left_.erase(0, at + end.size());
    return head;
  }

  void take(char* into, size_t nbytes) {
    const size_t early = std::min(nbytes, left_.size());
    std::memcpy(into, left_.data(), early);
    left_.erase(0, early);
    for (size_t done = early; done < nbytes;) {
      const ssize_t got = recv(fd_, into + done, nbytes - done, 0);
      if (got <= 0) fail("the server ended the connection within a body");
      done += static_cast<size_t>(got);
    }
  }

 private:
  const int fd_;
  std::string left_;
};

void on_threads(size_t count, const std::function<void(size_t)>& work) {
  std::vector<std::thread> pool;
  for (size_t i = 0; i < count; ++i) pool.emplace_back(work, i);
  for (std::thread& thread : pool) thread.join();
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Runs `receive(memory)` on the clock, with memory that is fresh or resident.
double timed(size_t nbytes, bool resident, const std::function<void(char*)>& receive) {
  if (!resident) {
    fault_in_and_free(nbytes + nbytes / 10);
    return seconds_of([&] { receive(huge_memory(nbytes)); });
  }
  char* memory = huge_memory(nbytes);
  std::memset(memory, 1, nbytes);
  return seconds_of([&] { receive(memory); });
}

double load_http(size_t connections, bool resident) {
  std::string host, port, path;
  size_t nbytes = 0;
  if (!(std::cin >> host >> port >> path >> nbytes)) fail("no target");
  const size_t share = round_up((nbytes + connections - 1) / connections, 4096);
  return timed(nbytes, resident, [&](char* memory) {
    on_threads(connections, [&](size_t i) {
      const size_t begin = std::min(nbytes, i * share);
      const size_t end = std::min(nbytes, begin + share);
      if (begin == end) return;
      Connection connection(host, port);
      connection.send_all("GET " + path + " HTTP/1.1\r\nHost: " + host + ":" + port +
                          "\r\nRange: bytes=" + std::to_string(begin) + "-" +
                          std::to_string(end - 1) + "\r\n\r\n");
      const std::string head = connection.read_until("\r\n\r\n");
      if (head.compare(0, 12, "HTTP/1.1 206") != 0) fail(head.substr(0, head.find('\r')));
      connection.take(memory + begin, end - begin);
    });
  });
}

struct Piece {
  std::string command;
  size_t at;
  size_t nbytes;
};

std::string bulk(const std::string& word) {
  return "$" + std::to_string(word.size()) + "\r\n" + word + "\r\n";
}

std::vector<Piece> read_pieces(size_t& total) {
  std::vector<Piece> pieces;
  std::string line;
  while (std::getline(std::cin, line)) {
    const size_t space = line.rfind(' ');
    if (space == std::string::npos) continue;
    const std::string key = line.substr(0, space);
    const size_t nbytes = std::stoull(line.substr(space + 1));
    for (size_t from = 0; from < nbytes; from += kPieceBytes) {
      const size_t size = std::min(kPieceBytes, nbytes - from);
      pieces.push_back({"*4\r\n$8\r\nGETRANGE\r\n" + bulk(key) + bulk(std::to_string(from)) +
                            bulk(std::to_string(from + size - 1)),
                        total, size});
      total += size;
    }
  }
  return pieces;
}

double load_redis(size_t connections, bool resident) {
  std::string host, port;
  if (!(std::cin >> host >> port)) fail("no target");
  size_t nbytes = 0;
  const std::vector<Piece> pieces = read_pieces(nbytes);
  return timed(nbytes, resident, [&](char* memory) {
    on_threads(connections, [&](size_t i) {
      Connection connection(host, port);
      const size_t begin = pieces.size() * i / connections;
      const size_t end = pieces.size() * (i + 1) / connections;
      size_t asked = begin;
      for (size_t at = begin; at < end; ++at) {
        for (; asked < std::min(end, at + kPipelined); ++asked)
          connection.send_all(pieces[asked].command);
        if (connection.read_until("\r\n") != "$" + std::to_string(pieces[at].nbytes) + "\r\n")
          fail("a reply of another length");
        connection.take(memory + pieces[at].at, pieces[at].nbytes);
        if (connection.read_until("\r\n") != "\r\n") fail("a reply that is too long");
      }
    });
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("usage: limits_net WHAT CONNECTIONS < TARGET");
  std::string what = argv[1];
  const size_t connections = std::max<size_t>(1, std::strtoull(argv[2], nullptr, 10));
  const std::string suffix = "-resident";
  const bool resident = what.ends_with(suffix);
  if (resident) what.resize(what.size() - suffix.size());
  if (what != "http" && what != "redis") fail("unknown: " + what);
  std::printf("{\"seconds\": %.9f}\n", what == "http" ? load_http(connections, resident)
                                                      : load_redis(connections, resident));
}
