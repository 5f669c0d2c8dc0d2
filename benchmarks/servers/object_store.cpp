// An object store to measure against: an HTTP server of one folder that answers every request after
// a while, and sends on each connection at a bounded rate.
// usage: object_store FOLDER LATENCY_MS BYTES_PER_SECOND [SLOW_EVERY SLOW_FACTOR [MOST]]
//   One request in SLOW_EVERY takes SLOW_FACTOR times as long; 0 for none. While MOST requests are
//   under way, others are answered with 503. Prints its port; ends with its input.
//   GET /path with or without one range; HEAD
//   GET /-/requests      how many other requests there were, at once
// One thread: what is due on each connection goes out every few milliseconds by sendfile, so that
// the server takes little of the machine from the client.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick{4};
// What a connection that was not read from may catch up on: two ticks.
constexpr std::chrono::duration<double> kCredit = 2 * kTick;
constexpr size_t kMaxHead = 64 << 10;
constexpr uint64_t kSlowOne = 10;  // of SLOW_EVERY: not the one that opens the object

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

struct File {
  int fd = -1;
  int64_t size = 0;
  std::string etag;
};

struct Connection {
  int fd = -1;
  std::string input;
  // The response under way.
  bool busy = false;
  double rate = 0;
  Clock::time_point due;  // when its first byte goes out
  std::string head;       // not yet sent
  const File* file = nullptr;
  off_t at = 0;
  int64_t left = 0;
  Clock::time_point paid_until;  // bytes for the time before are sent
};

struct Manners {
  std::chrono::milliseconds latency{0};
  double rate = 0;  // bytes per second of a connection
  uint64_t slow_every = 0;
  int slow_factor = 1;
  int most = 0;  // requests under way; 0 for any number
};

class Server {
 public:
  Server(std::string folder, const Manners& manners)
      : folder_(std::move(folder)), manners_(manners) {}

  void run();

 private:
  void listen_on_loopback();
  void accept_all();
  void receive(Connection& connection);
  void start_response(Connection& connection);
  void answer(Connection& connection, std::string_view request);
  bool send_due(Connection& connection, Clock::time_point now);
  const File* find(const std::string& path);
  bool is_overloaded() const;
  void drop(int fd);

  const std::string folder_;
  const Manners manners_;
  int listener_ = -1;
  int poll_ = -1;
  uint64_t requests_ = 0;
  std::map<std::string, File> files_;
  std::map<int, std::unique_ptr<Connection>> connections_;
};

void Server::listen_on_loopback() {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t nbytes = sizeof address;
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), nbytes) != 0) fail("bind");
  if (listen(listener_, 512) != 0) fail("listen");
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &nbytes);
  std::printf("%d\n", ntohs(address.sin_port));
  std::fflush(stdout);
}

void Server::run() {
  listen_on_loopback();
  poll_ = epoll_create1(EPOLL_CLOEXEC);
  const auto watch = [&](int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(poll_, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
  };
  watch(listener_);
  watch(STDIN_FILENO);
  for (;;) {
    bool busy = false;
    for (const auto& [fd, connection] : connections_) busy = busy || connection->busy;
    epoll_event events[64];
    const int count = epoll_wait(poll_, events, 64, busy ? static_cast<int>(kTick.count()) : -1);
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == STDIN_FILENO) return;  // whoever started this has ended
      if (fd == listener_) {
        accept_all();
      } else if (const auto found = connections_.find(fd); found != connections_.end()) {
        receive(*found->second);
      }
    }
    std::vector<int> broken;
    const Clock::time_point now = Clock::now();
    for (const auto& [fd, connection] : connections_) {
      if (connection->fd < 0 || (connection->busy && !send_due(*connection, now)))
        broken.push_back(fd);
    }
    for (int fd : broken) drop(fd);
  }
}

void Server::accept_all() {
  for (;;) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(poll_, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
    auto connection = std::make_unique<Connection>();
    connection->fd = fd;
    connections_[fd] = std::move(connection);
  }
}

void Server::drop(int fd) {
  connections_.erase(fd);
  close(fd);
}

void Server::receive(Connection& connection) {
  char block[16 << 10];
  const ssize_t got = recv(connection.fd, block, sizeof block, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0 || connection.input.size() > kMaxHead) {
    connection.fd = -1;  // dropped at the end of the round
    return;
  }
  connection.input.append(block, static_cast<size_t>(got));
  if (!connection.busy) start_response(connection);
}

void Server::start_response(Connection& connection) {
  const size_t end = connection.input.find("\r\n\r\n");
  if (end == std::string::npos) return;
  const std::string request = connection.input.substr(0, end + 2);
  connection.input.erase(0, end + 4);
  answer(connection, request);
}

const File* Server::find(const std::string& path) {
  const auto known = files_.find(path);
  if (known != files_.end()) return &known->second;
  if (path.find("..") != std::string::npos) return nullptr;
  const int fd = open((folder_ + path).c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    if (fd >= 0) close(fd);
    return nullptr;
  }
  const std::string etag = "\"" + std::to_string(info.st_mtim.tv_sec) + "-" +
                           std::to_string(info.st_mtim.tv_nsec) + "-" +
                           std::to_string(info.st_size) + "\"";
  return &(files_[path] = File{fd, info.st_size, etag});
}

// "bytes=FIRST-LAST" or "bytes=FIRST-", in any case of the header's name; false where there is
// none.
bool parse_range(std::string_view request, int64_t& first, int64_t& last) {
  for (size_t at = request.find("\r\n"); at != std::string_view::npos;
       at = request.find("\r\n", at + 2)) {
    const std::string line(request.substr(at + 2, request.find("\r\n", at + 2) - at - 2));
    if (strncasecmp(line.c_str(), "range:", 6) != 0) continue;
    long long begin = 0, end = -1;
    const int fields = std::sscanf(line.c_str() + 6, " bytes=%lld-%lld", &begin, &end);
    first = begin;
    last = fields == 2 ? end : -1;
    return fields >= 1;
  }
  return false;
}

bool Server::is_overloaded() const {
  const auto is_busy = [](const auto& each) { return each.second->busy; };
  return manners_.most > 0 &&
         std::count_if(connections_.begin(), connections_.end(), is_busy) >= manners_.most;
}

void Server::answer(Connection& connection, std::string_view request) {
  const size_t space = request.find(' ');
  const size_t end = request.find(' ', space + 1);
  const std::string_view method = request.substr(0, space);
  std::string path(request.substr(space + 1, end - space - 1));
  path = path.substr(0, path.find('?'));
  const bool overloaded = is_overloaded();
  connection.busy = true;
  connection.file = nullptr;
  connection.left = 0;
  const Clock::time_point now = Clock::now();
  if (path == "/-/requests") {
    const std::string body = std::to_string(requests_);
    connection.due = connection.paid_until = now;
    connection.head =
        "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    return;
  }
  const bool slow = manners_.slow_every > 0 && requests_ % manners_.slow_every == kSlowOne;
  ++requests_;
  const int factor = slow ? manners_.slow_factor : 1;
  connection.rate = manners_.rate / factor;
  connection.due = connection.paid_until = now + manners_.latency * factor;
  if (overloaded) {
    connection.head = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
    return;
  }
  const File* file = find(path);
  int64_t first = 0, last = -1;
  const bool ranged = parse_range(request, first, last);
  if (file == nullptr || first < 0 || (ranged && first >= file->size)) {
    connection.head = std::string("HTTP/1.1 ") +
                      (file ? "416 Range Not Satisfiable" : "404 Not Found") +
                      "\r\nContent-Length: 0\r\n\r\n";
    return;
  }
  last = last < 0 ? file->size - 1 : std::min(last, file->size - 1);
  const int64_t nbytes = std::max<int64_t>(0, last - first + 1);
  connection.head = ranged ? "HTTP/1.1 206 Partial Content\r\n" : "HTTP/1.1 200 OK\r\n";
  if (ranged)
    connection.head += "Content-Range: bytes " + std::to_string(first) + "-" +
                       std::to_string(last) + "/" + std::to_string(file->size) + "\r\n";
  connection.head += "Content-Length: " + std::to_string(nbytes) +
                     "\r\nAccept-Ranges: bytes\r\nETag: " + file->etag + "\r\n\r\n";
  if (method == "HEAD") return;
  connection.file = file;
  connection.at = first;
  connection.left = nbytes;
}

// Sends what is due by now; false where the connection is of no more use.
bool Server::send_due(Connection& connection, Clock::time_point now) {
  if (now < connection.due) return true;
  while (!connection.head.empty()) {
    const ssize_t put =
        send(connection.fd, connection.head.data(), connection.head.size(), MSG_NOSIGNAL);
    if (put < 0) return errno == EAGAIN || errno == EINTR;
    connection.head.erase(0, static_cast<size_t>(put));
  }
  const auto credit = std::chrono::duration_cast<Clock::duration>(kCredit);
  connection.paid_until = std::max(connection.paid_until, now - credit);
  const std::chrono::duration<double> unpaid = now - connection.paid_until;
  int64_t due = std::min(connection.left, static_cast<int64_t>(unpaid.count() * connection.rate));
  while (due > 0) {
    const ssize_t put =
        sendfile(connection.fd, connection.file->fd, &connection.at, static_cast<size_t>(due));
    if (put < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (put <= 0) return false;
    due -= put;
    connection.left -= put;
    const std::chrono::duration<double> worth(static_cast<double>(put) / connection.rate);
    connection.paid_until += std::chrono::duration_cast<Clock::duration>(worth);
  }
  if (connection.left == 0) {
    connection.busy = false;
    start_response(connection);  // a request that came early
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc > 7) {
    std::fprintf(stderr,
                 "usage: object_store FOLDER LATENCY_MS BYTES_PER_SECOND "
                 "[SLOW_EVERY SLOW_FACTOR [MOST]]\n");
    return 2;
  }
  Manners manners;
  manners.latency = std::chrono::milliseconds(std::atol(argv[2]));
  manners.rate = std::atof(argv[3]);
  if (argc > 4) manners.slow_every = static_cast<uint64_t>(std::atol(argv[4]));
  if (argc > 5) manners.slow_factor = std::atoi(argv[5]);
  if (argc > 6) manners.most = std::atoi(argv[6]);
  std::signal(SIGPIPE, SIG_IGN);  // sendfile knows no MSG_NOSIGNAL
  Server(argv[1], manners).run();
}
