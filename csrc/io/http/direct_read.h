// One ranged GET in clear over HTTP/1.1 whose body goes from the socket straight into its
// destination.
//
// libcurl's own way costs one more copy: a load of 200 MB from nginx on loopback (two cores, 16
// connections, medians of 25 in turn) takes 0.132 s in place of 0.106, and 0.091 s of processor
// time in place of 0.070. Does what nearly every response needs and leaves everything else (another
// framing, a redirect, a 200) to libcurl.
#pragma once

#include <functional>
#include <stop_token>

#include "io/http/http_client.h"
#include "io/slices.h"

namespace tensorizer::io {

// Whether a response is framed in a way that is understood here.
bool is_direct_framing(const ResponseHead& head);

// Whether a request, which has its URL, is one that direct_read can send.
bool can_be_read_directly(const HttpOptions& options, const HttpRequest& request);

// What a direct read needs of its caller.
struct DirectRead {
  HttpClient& client;
  const HttpRequest& request;
  // Called with the head of a 206. Throws HttpFailure to refuse it.
  std::function<void(const ResponseHead&)> accept;
  // Has room for the range; moves on with what is in place.
  ScatterCursor& into;
  // Called now and then; may throw.
  std::function<void()> meanwhile;
};

// False: libcurl has to send the request, and those of the next reads if what came back is the
// reason.
//
// Cannot send https, passwords, HTTP/2, unusual headers, and nothing through a proxy; those of the
// environment are ruled out by HttpOptions::direct_nbytes. Uses the connection in `kept` if it
// fits, and leaves there the one that can be used again. Throws HttpFailure, what `meanwhile`
// throws, Errc::cancelled.
bool direct_read(std::unique_ptr<CurlSocket>& kept, const DirectRead& read,
                 const std::stop_token& stop);

}  // namespace tensorizer::io
