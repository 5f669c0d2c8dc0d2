// One connection to a Redis server: commands out, replies in, pipelined. Confined to one thread at
// a time.
//
// hiredis formats the commands and parses small replies; it neither connects nor waits, so that
// every release from 0.14 on will do and TLS needs no module of it. Payload replies do not pass
// through its buffers: their bytes go from the socket straight to the destination. After an
// exception other than a server's error reply the next reply may be that of an earlier command:
// destroy the connection.
#pragma once

#include <hiredis/hiredis.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "io/curl/curl_socket.h"
#include "io/retry.h"

namespace tensorizer::io {

struct RedisOptions {
  SocketOptions socket;
  std::string user;      // empty: the default user
  std::string password;  // empty: no AUTH
  uint64_t database = 0;
  unsigned connections = 4;  // at the same time, at most
  RetryPolicy retry;         // of one read
};

// "redis://host:6379" or "rediss://...", never with credentials.
std::string redis_server_name(const SocketOptions& socket);

struct RedisReplyDeleter {
  void operator()(redisReply* reply) const noexcept { freeReplyObject(reply); }
};
using RedisReply = std::unique_ptr<redisReply, RedisReplyDeleter>;  // a small one

// Of a status, string or error.
inline std::string_view text_of(const redisReply& reply) noexcept {
  return {reply.str, static_cast<size_t>(reply.len)};
}

// The server answered, with an error: the connection can be used again. `again` when waiting may
// help.
class RedisServerError : public Error {
 public:
  RedisServerError(const std::string& what, std::string server, bool worth_retrying)
      : Error(Errc::io, what, std::move(server)), again(worth_retrying) {}
  bool again;
};

struct RedisReaderDeleter {
  void operator()(redisReader* reader) const noexcept { redisReaderFree(reader); }
};

class RedisHandle {
 public:
  // Connects, authenticates and selects the database.
  // A refused AUTH is no error by itself: a server that asks for no password still serves, and one
  // that does says NOAUTH to the first command, which then reports both.
  RedisHandle(const RedisOptions& options, const std::stop_token& stop);

  // Queues one command; nothing is sent before flush().
  void append(std::initializer_list<std::string_view> words);
  void flush(const std::stop_token& stop);

  // The next reply. Throws RedisServerError where it is an error, Errc::io when it is no RESP or
  // unreasonably large.
  RedisReply read_reply(const std::stop_token& stop);

  // Like read_reply for a reply that must be a string of exactly `wanted` bytes, which land in
  // `into`. `received` grows as bytes arrive. A string of another size or nil is Errc::truncated;
  // `what` names it.
  void read_value(ScatterCursor& into, uint64_t wanted, std::string_view what, uint64_t& received,
                  const std::stop_token& stop);

  // append, flush, read_reply.
  RedisReply command(std::initializer_list<std::string_view> words, const std::stop_token& stop);

  // Whether a reply has come.
  bool answered() const noexcept { return answered_; }
  // False where it is the parent's, or the server has ended it or said something unasked.
  bool is_usable() const noexcept {
    return socket_.is_of_this_process() && begin_ == end_ && socket_.is_quiet();
  }

  uint64_t generation = 0;  // of the source's connections

 private:
  void log_in(const RedisOptions& options, const std::stop_token& stop);
  void fill_input(const std::stop_token& stop);
  std::string read_line(const std::stop_token& stop);
  void receive_into(Buffer into, uint64_t& received, const std::stop_token& stop);
  // What came is no answer that Redis gives: nothing will be better on another connection.
  [[noreturn]] void fail_protocol(const std::string& problem) const;
  [[noreturn]] void fail_reply(const std::string& text) const;
  ConstBuffer input() const noexcept { return {input_.data() + begin_, end_ - begin_}; }

  std::string server_;
  std::vector<std::string> secrets_;  // the password
  bool logging_in_ = false;
  std::string login_problem_;  // what AUTH said, for the error that follows from it
  CurlSocket socket_;
  bool answered_ = false;
  std::string output_;
  std::vector<std::byte> input_;  // received and not yet consumed: [begin_, end_)
  size_t begin_ = 0;
  size_t end_ = 0;
  std::unique_ptr<redisReader, RedisReaderDeleter> reader_;
};

}  // namespace tensorizer::io
