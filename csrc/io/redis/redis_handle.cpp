#include "io/redis/redis_handle.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include "core/error.h"

namespace tensorizer::io {
namespace {

constexpr size_t kInputNbytes = 64 << 10;
// Pieces of a payload from this size on are received in place; smaller ones come through the input
// buffer, where one system call serves many of them.
constexpr size_t kDirectNbytes = 16 << 10;
// Small replies are a page of key names or a number. A server that sends more than this is not
// believed.
constexpr uint64_t kMaxReplyNbytes = uint64_t{256} << 20;
constexpr uint64_t kMaxReplyItems = uint64_t{1} << 22;

struct CommandDeleter {
  void operator()(char* command) const noexcept { redisFreeCommand(command); }
};

const redisReplyObjectFunctions* functions_of_hiredis = nullptr;

// The count is an int in hiredis 0.14 and a size_t later; taking the address below picks the type.
// nullptr means out of memory to hiredis.
template <class Count>
void* create_array(const redisReadTask* task, Count count) noexcept {
  if (static_cast<uint64_t>(count) > kMaxReplyItems) return nullptr;
  return functions_of_hiredis->createArray(task, count);
}

// Those of hiredis, which makes room for as many items as an array announces, with a bound.
redisReplyObjectFunctions* bounded_functions(const redisReader& reader) {
  static redisReplyObjectFunctions functions = [&] {
    functions_of_hiredis = reader.fn;
    redisReplyObjectFunctions bounded = *reader.fn;
    bounded.createArray = &create_array;
    return bounded;
  }();
  return &functions;
}

bool starts_with_word(std::string_view text, std::string_view word) {
  return text.starts_with(word) && (text.size() == word.size() || text[word.size()] == ' ');
}

constexpr std::array<std::string_view, 5> kPassing = {"LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN",
                                                      "CLUSTERDOWN"};

// What may be told of the answer to AUTH, which may quote the password, whole or in part.
std::string_view told_of_login(std::string_view text) {
  constexpr std::array<std::string_view, 6> kTold = {"WRONGPASS",
                                                     "NOAUTH",
                                                     "NOPERM",
                                                     "ERR invalid password",
                                                     "ERR wrong number of arguments",
                                                     "ERR unknown command"};
  for (const auto& words :
       {std::span<const std::string_view>(kTold), std::span<const std::string_view>(kPassing)})
    for (std::string_view known : words)
      if (text.starts_with(known)) return known;
  return "its words may quote the password";
}

bool worth_retrying(std::string_view text) {
  return std::any_of(kPassing.begin(), kPassing.end(),
                     [&](std::string_view word) { return starts_with_word(text, word); });
}

}  // namespace

std::string redis_server_name(const SocketOptions& socket) {
  const bool ipv6 = socket.host.find(':') != std::string::npos;
  return (socket.tls ? "rediss://" : "redis://") + (ipv6 ? "[" + socket.host + "]" : socket.host) +
         ":" + std::to_string(socket.port);
}

RedisHandle::RedisHandle(const RedisOptions& options, const std::stop_token& stop)
    : server_(redis_server_name(options.socket)),
      socket_(options.socket, server_, stop),
      input_(kInputNbytes),
      reader_(redisReaderCreate()) {
  if (!reader_) throw std::bad_alloc();
  reader_->fn = bounded_functions(*reader_);
  log_in(options, stop);
}

void RedisHandle::log_in(const RedisOptions& options, const std::stop_token& stop) {
  if (!options.password.empty()) {
    secrets_ = {options.password};
    logging_in_ = true;
    if (options.user.empty())
      append({"AUTH", options.password});
    else
      append({"AUTH", options.user, options.password});
    flush(stop);
    output_.clear();
    try {
      read_reply(stop);
    } catch (const RedisServerError& refused) {
      if (refused.again) throw;
      login_problem_ = refused.what();
    }
    logging_in_ = false;
  }
  if (options.database != 0) command({"SELECT", std::to_string(options.database)}, stop);
}

void RedisHandle::append(std::initializer_list<std::string_view> words) {
  std::vector<const char*> texts;
  std::vector<size_t> sizes;
  for (std::string_view word : words) {
    texts.push_back(word.data());
    sizes.push_back(word.size());
  }
  char* raw = nullptr;
  const auto nbytes =
      redisFormatCommandArgv(&raw, static_cast<int>(texts.size()), texts.data(), sizes.data());
  std::unique_ptr<char, CommandDeleter> command(raw);
  if (nbytes < 0) throw std::bad_alloc();
  output_.append(command.get(), static_cast<size_t>(nbytes));
}

void RedisHandle::flush(const std::stop_token& stop) {
  if (output_.empty()) return;
  socket_.send_all(std::as_bytes(std::span(output_)), stop);
  output_.clear();
}

RedisReply RedisHandle::command(std::initializer_list<std::string_view> words,
                                const std::stop_token& stop) {
  append(words);
  flush(stop);
  return read_reply(stop);
}

// REQUIRES: the input buffer is empty, or holds less than its capacity of one unfinished line.
void RedisHandle::fill_input(const std::stop_token& stop) {
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (end_ == input_.size()) {
    std::memmove(input_.data(), input_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    if (end_ == input_.size()) fail_protocol("a reply line of more than 64 KiB");
  }
  end_ += socket_.receive_some(Buffer(input_).subspan(end_), stop);
}

RedisReply RedisHandle::read_reply(const std::stop_token& stop) {
  uint64_t fed = 0;
  while (true) {
    void* raw = nullptr;
    if (redisReaderGetReply(reader_.get(), &raw) != REDIS_OK)
      fail_protocol(redisReaderGetError(reader_.get()));
    if (raw) {
      RedisReply reply(static_cast<redisReply*>(raw));
      answered_ = true;
      if (reply->type == REDIS_REPLY_ERROR) fail_reply(std::string(text_of(*reply)));
      return reply;
    }
    if (begin_ == end_) fill_input(stop);
    const ConstBuffer bytes = input();
    if ((fed += bytes.size()) > kMaxReplyNbytes) fail_protocol("a reply of more than 256 MiB");
    if (redisReaderFeed(reader_.get(), reinterpret_cast<const char*>(bytes.data()), bytes.size()) !=
        REDIS_OK)
      throw std::bad_alloc();
    begin_ = end_;
  }
}

std::string RedisHandle::read_line(const std::stop_token& stop) {
  size_t searched = 0;
  while (true) {
    const ConstBuffer bytes = input();
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const size_t at = text.find("\r\n", searched);
    if (at != std::string_view::npos) {
      std::string line(text.substr(0, at));
      begin_ += at + 2;
      return line;
    }
    searched = text.empty() ? 0 : text.size() - 1;
    fill_input(stop);
  }
}

void RedisHandle::read_value(ScatterCursor& into, uint64_t wanted, std::string_view what,
                             uint64_t& received, const std::stop_token& stop) {
  const std::string line = read_line(stop);
  if (line.starts_with('-')) fail_reply(line.substr(1));
  int64_t found = 0;
  const char* const last = line.data() + line.size();
  const char* const digits = line.starts_with('$') ? line.data() + 1 : last;
  const auto [end, problem] = std::from_chars(digits, last, found);
  if (problem != std::errc{} || end != last || found < -1) fail_protocol("expected a string");
  if (static_cast<uint64_t>(std::max<int64_t>(found, 0)) != wanted || found < 0)
    throw Error(Errc::truncated,
                server_ + ": " + std::string(what) + ": expected " + std::to_string(wanted) +
                    " bytes, got " + (found < 0 ? "no value" : std::to_string(found)) +
                    "; the key was changed or removed while it was read",
                server_);
  for (uint64_t left = wanted; left > 0;) {
    const Buffer place = into.place(left);
    receive_into(place, received, stop);
    into.skip(place.size());
    left -= place.size();
  }
  std::array<std::byte, 2> line_end;
  uint64_t ignored = 0;
  receive_into(line_end, ignored, stop);
  if (line_end[0] != std::byte{'\r'} || line_end[1] != std::byte{'\n'})
    fail_protocol("a string that is longer than announced");
}

void RedisHandle::receive_into(Buffer into, uint64_t& received, const std::stop_token& stop) {
  while (!into.empty()) {
    size_t n = 0;
    if (begin_ == end_ && into.size() >= kDirectNbytes) {
      n = socket_.receive_some(into, stop);
    } else {
      if (begin_ == end_) fill_input(stop);
      n = std::min(into.size(), end_ - begin_);
      std::memcpy(into.data(), input_.data() + begin_, n);
      begin_ += n;
    }
    received += n;
    into = into.subspan(n);
  }
}

void RedisHandle::fail_protocol(const std::string& problem) const {
  throw Error(Errc::io, server_ + ": not an answer that Redis gives: " + problem, server_);
}

void RedisHandle::fail_reply(const std::string& text) const {
  std::string what = server_ + ": the server refused";
  if (logging_in_)
    what += " the login: " + std::string(told_of_login(text));
  else
    what += ": " + printable(without_secrets(text, secrets_), 300);
  const bool denied = starts_with_word(text, "NOAUTH") || starts_with_word(text, "NOPERM");
  if (denied && !login_problem_.empty()) what = login_problem_;
  if (denied && login_problem_.empty()) what += " (give user and password in the URI)";
  if (starts_with_word(text, "MOVED") || starts_with_word(text, "ASK"))
    what += " (Redis Cluster is not supported: name the node that holds the keys)";
  throw RedisServerError(what, server_, worth_retrying(text));
}

}  // namespace tensorizer::io
