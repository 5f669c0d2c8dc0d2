// How far a reader walks from a worker of a load to the call that receives its bytes.
#include <arpa/inet.h>
#include <curl/curl.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>

#include "core/process_pool.h"
#include "core/unique_fd.h"
#include "io/cache/cache_disk.h"
#include "io/cache/cache_source.h"
#include "io/http/http_source.h"
#include "session_harness.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_FRAMES 1
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#undef COUNTS_FRAMES
#endif
#endif

#if defined(COUNTS_FRAMES)

namespace {

// The most frames of this program on the way: from the read of a worker to the hand-over of its
// request, and from the loop of the reactor to recv().
std::atomic<int> to_reactor{0}, to_recv{0};
std::atomic<int> of_pool{0};  // frames below every job of the process
thread_local int below = 0;   // frames of this thread that do not count
std::atomic<bool> counting{false};

int frames_of_program() {
  std::array<void*, 128> found{};
  const int count = backtrace(found.data(), static_cast<int>(found.size()));
  Dl_info here{}, at{};
  dladdr(reinterpret_cast<void*>(&frames_of_program), &here);
  int frames = 0;
  for (int i = 0; i < count; ++i)
    if (dladdr(found[static_cast<size_t>(i)], &at) != 0 && at.dli_fbase == here.dli_fbase) ++frames;
  return frames - 2;  // this one, and the replaced call
}

void note(std::atomic<int>& most, int not_counted) {
  if (!counting) return;
  const int now = frames_of_program() - not_counted;
  for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
  }
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// In place of those that libcurl and the reactor call.
extern "C" ssize_t recv(int fd, void* into, size_t nbytes, int flags) {
  static auto* const real_recv = real<ssize_t(int, void*, size_t, int)>("recv");
  note(to_recv, of_pool);
  return real_recv(fd, into, nbytes, flags);
}
extern "C" CURLMcode curl_multi_wakeup(CURLM* multi) {
  static auto* const real_wakeup = real<CURLMcode(CURLM*)>("curl_multi_wakeup");
  note(to_reactor, below);
  return real_wakeup(multi);
}

namespace tensorizer::tests {
namespace {

// Answers ranges of `object`, with a thread for each connection.
class RangeServer {
 public:
  explicit RangeServer(const Bytes& object) : object_(object) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const place = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener_.get(), place, length), 0);
    EXPECT_EQ(listen(listener_.get(), 16), 0);
    getsockname(listener_.get(), place, &length);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] {
      for (int fd; (fd = accept(listener_.get(), nullptr, nullptr)) >= 0;)
        threads_.emplace_back([this, connection = UniqueFd(fd)] { serve(connection.get()); });
    });
  }
  ~RangeServer() {
    shutdown(listener_.get(), SHUT_RDWR);
    acceptor_.join();
    for (std::thread& thread : threads_) thread.join();  // the client has closed its connections
  }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_) + "/object"; }

 private:
  void serve(int fd) const {
    std::string request;
    for (char c = 0; read(fd, &c, 1) == 1;) {
      request += c;
      if (!request.ends_with("\r\n\r\n")) continue;
      size_t first = 0, last = 0;
      const size_t at = request.find("Range: bytes=");
      if (at == request.npos ||
          std::sscanf(request.c_str() + at, "Range: bytes=%zu-%zu", &first, &last) != 2)
        return;
      last = std::min(last, object_.size() - 1);
      std::string answer = "HTTP/1.1 206 Partial Content\r\nETag: \"x\"\r\nContent-Range: bytes " +
                           std::to_string(first) + "-" + std::to_string(last) + "/" +
                           std::to_string(object_.size()) +
                           "\r\nContent-Length: " + std::to_string(last - first + 1) + "\r\n\r\n";
      answer.append(reinterpret_cast<const char*>(object_.data()) + first, last - first + 1);
      if (send(fd, answer.data(), answer.size(), MSG_NOSIGNAL) < 0) return;
      request.clear();
    }
  }

  const Bytes& object_;
  UniqueFd listener_{socket(AF_INET, SOCK_STREAM, 0)};
  int port_ = 0;
  std::thread acceptor_;
  std::vector<std::thread> threads_;
};

// What a worker reads from: from here on frames count.
class Counted final : public io::RangeSource {
 public:
  explicit Counted(std::shared_ptr<io::RangeSource> source) : source_(std::move(source)) {}
  const std::string& name() const noexcept override { return source_->name(); }
  std::optional<uint64_t> size() const override { return source_->size(); }
  io::SourceTraits traits() const override { return source_->traits(); }
  uint64_t bytes_read() const noexcept override { return source_->bytes_read(); }
  using io::RangeSource::read_at;
  void read_at(uint64_t offset, std::span<const io::Buffer> buffers,
               const std::stop_token& stop) override {
    below = frames_of_program() + 1;
    source_->read_at(offset, buffers, stop);
  }

 private:
  const std::shared_ptr<io::RangeSource> source_;
};

TEST(HttpWalk, FromAWorkerToRecvThereAreNineFramesAtMost) {
  // From the begin of its thread to a job: one frame of the job, which frames_of_program() counts
  // as the replaced call.
  ProcessPool::instance().start([] { of_pool = frames_of_program() + 1; }).join();
  const auto keys = std::make_shared<load::KeyRing>(test_key());
  const Bytes file = save_all(make_tensors({3 << 20, 9 << 20, 5 << 20}, 4), {.key = test_key()});
  const RangeServer server(file);
  char root[] = "/tmp/tzr-walk-XXXXXX";
  ASSERT_NE(mkdtemp(root), nullptr);
  {
    io::HttpOptions options;
    options.head_nbytes = 4096;
    options.proxy = "";
    const std::shared_ptr<io::HttpSource> network =
        io::HttpSource::open({.url = server.url()}, options, 0, std::nullopt, {});
    const auto source = io::CacheSource::open(
        io::CacheFolder::open(root, true),
        {std::string(32, '1'), std::string(32, '2'), file.size(), "{}", {}}, network, "object");
    source->begin_load(file.size(), {});
    Counted counted(source);
    std::vector<Bytes> found;
    counting = true;
    load_all(counted, {.keys = keys}, found);
    counting = false;
    source->close();
  }
  std::filesystem::remove_all(root);
  EXPECT_GT(to_recv, 0);
  EXPECT_LE(to_reactor + to_recv, 9) << to_reactor << " to the reactor, " << to_recv << " in it";
}

}  // namespace
}  // namespace tensorizer::tests

#endif
