// Responses, header values, URLs and the judgement over responses: pure, so tested without a
// network.
#include <gtest/gtest.h>

#include "io/buffers.h"
#include "io/http/http_exchange.h"
#include "io/http/http_message.h"
#include "io/http/http_url.h"

namespace tensorizer::io {
namespace {

HttpResponse response_of(int status, HttpHeaderList fields) {
  return {status, "HTTP/1.1 " + std::to_string(status) + " Text", std::move(fields)};
}

RangeRequest bytes_100_to_199(const ResourceIdentity* known = nullptr) {
  return {100, 100, known, false};
}

// The failure with which check_response refuses; an empty reason if it accepts.
HttpFailure refusal(const RangeRequest& request, const HttpResponse& response) {
  try {
    check_response(request, response);
  } catch (const HttpFailure& failure) {
    return failure;
  }
  return {};
}

TEST(HttpMessage, ContentRangeIsReadExactly) {
  const auto range = parse_content_range("bytes 0-99/1000");
  ASSERT_TRUE(range);
  EXPECT_EQ(range->first, 0u);
  EXPECT_EQ(range->last, 99u);
  EXPECT_EQ(range->total, 1000u);
  EXPECT_FALSE(parse_content_range("bytes 0-99/*")->total);
  EXPECT_FALSE(parse_content_range("bytes */1000")->satisfied);
  EXPECT_TRUE(parse_content_range(" BYTES  5-5/6 "));
}

TEST(HttpMessage, ContentRangeThatContradictsItselfIsRefused) {
  for (const char* text :
       {"", "bytes", "bytes 0-99", "bytes 99-0/1000", "bytes 0-1000/1000", "bytes -5/10",
        "bytes 0-/10", "bytes 0-99/x", "items 0-99/1000", "bytes 0-99/-1", "bytes +1-2/9",
        "bytes 0-18446744073709551616/*", "bytes 0x1-2/9"})
    EXPECT_FALSE(parse_content_range(text)) << text;
}

TEST(HttpMessage, RetryAfterIsSecondsOrADate) {
  using std::chrono::seconds;
  EXPECT_EQ(parse_retry_after("120", 0), seconds(120));
  EXPECT_EQ(parse_retry_after("Thu, 01 Jan 1970 00:01:40 GMT", 40), seconds(60));
  EXPECT_EQ(parse_retry_after("Thu, 01 Jan 1970 00:00:10 GMT", 40), seconds(0));
  EXPECT_EQ(parse_retry_after("99999999999999999", 0), seconds(86400));
  EXPECT_FALSE(parse_retry_after("soon", 0));
}

TEST(HttpMessage, HeaderNamesMatchInAnyCase) {
  const auto response = response_of(200, {{"ETag", "\"a\""}});
  EXPECT_EQ(find_field(response.headers, "etag"), "\"a\"");
  EXPECT_FALSE(find_field(response.headers, "eta"));
}

TEST(HttpMessage, WeakEtagsProveNothing) {
  ResourceIdentity identity;
  identity.etag = "W/\"a\"";
  EXPECT_FALSE(identity.proves_content());
  identity.etag = "\"a\"";
  EXPECT_TRUE(identity.proves_content());
  identity = {std::nullopt, "Thu, 01 Jan 1970 00:00:10 GMT", std::nullopt};
  EXPECT_FALSE(identity.proves_content());
  identity.size = 5;
  EXPECT_TRUE(identity.proves_content());
}

TEST(HttpMessage, MessagesArePrintableAscii) {
  EXPECT_EQ(printable("a\x1b[31mb\r\nc\xff"), "a?[31mb??c?");
  EXPECT_EQ(printable("12345", 3), "123...");
}

TEST(HttpMessage, SecretsAndTheirLongerWordsAreTakenOut) {
  const std::vector<std::string> secrets{"Bearer abcdefgh1", "v=1&sig=QSECRET12", "ab"};
  EXPECT_EQ(without_secrets("no abcdefgh1, v=1&sig=QSECRET12, QSECRET12, ab", secrets),
            "no <redacted>, <redacted>, <redacted>, ab");
  EXPECT_EQ(without_secrets("red", std::vector<std::string>{"red"}), "<redacted>");
}

TEST(HttpCheck, TheRangeThatWasAskedForIsAccepted) {
  const auto checked = check_response(
      bytes_100_to_199(),
      response_of(206, {{"Content-Range", "bytes 100-199/1000"}, {"Content-Length", "100"}}));
  EXPECT_TRUE(checked.partial);
  EXPECT_EQ(checked.body_nbytes, 100u);
  EXPECT_EQ(checked.identity.size, 1000u);
}

TEST(HttpCheck, TheLastRangeMayBeCutByTheEndAndByNothingElse) {
  EXPECT_EQ(
      check_response(bytes_100_to_199(), response_of(206, {{"Content-Range", "bytes 100-149/150"}}))
          .body_nbytes,
      50u);
  for (const char* range :
       {"bytes 100-148/150", "bytes 100-199/*x", "bytes 99-199/1000", "bytes 101-199/1000",
        "bytes 100-198/1000", "bytes 100-200/1000", "bytes */1000", "garbage"})
    EXPECT_EQ(refusal(bytes_100_to_199(), response_of(206, {{"Content-Range", range}})).status, 206)
        << range;
  EXPECT_NE(refusal(bytes_100_to_199(), response_of(206, {})).reason.find("no Content-Range"),
            std::string::npos);
}

TEST(HttpCheck, AContentLengthThatContradictsTheRangeIsRefused) {
  for (const char* length : {"99", "101", "-1", "1e2", ""})
    EXPECT_EQ(refusal(bytes_100_to_199(), response_of(206, {{"Content-Range", "bytes 100-199/1000"},
                                                            {"Content-Length", length}}))
                  .status,
              206)
        << length;
}

TEST(HttpCheck, A200MeansAServerWithoutRangesOnlyWhenItOpensTheObject) {
  EXPECT_FALSE(
      check_response(bytes_100_to_199(), response_of(200, {{"Content-Length", "7"}})).partial);
  const ResourceIdentity known;
  EXPECT_EQ(refusal(bytes_100_to_199(&known), response_of(200, {})).status, 200);
  EXPECT_FALSE(refusal(bytes_100_to_199(&known), response_of(200, {})).transient);
}

TEST(HttpCheck, AnotherSizeEtagOrDateIsAChangedObject) {
  const ResourceIdentity known{"\"a\"", "Thu, 01 Jan 1970 00:00:10 GMT", 1000};
  const HttpField range{"Content-Range", "bytes 100-199/1000"};
  EXPECT_EQ(refusal(bytes_100_to_199(&known), response_of(206, {range, {"ETag", "\"a\""}})).reason,
            "");
  for (const auto& response :
       {response_of(206, {range, {"ETag", "\"b\""}}),
        response_of(206, {{"Content-Range", "bytes 100-199/999"}}),
        response_of(206, {range, {"Last-Modified", "Thu, 01 Jan 1970 00:00:11 GMT"}})})
    EXPECT_NE(refusal(bytes_100_to_199(&known), response).reason.find("changed"),
              std::string::npos);
}

TEST(HttpCheck, AnEmptyObjectMayAnswer416) {
  const RangeRequest first{0, 100, nullptr, false};
  EXPECT_EQ(check_response(first, response_of(416, {{"Content-Range", "bytes */0"}})).identity.size,
            0u);
  EXPECT_EQ(refusal(first, response_of(416, {{"Content-Range", "bytes */5"}})).status, 416);
  EXPECT_EQ(refusal(first, response_of(416, {})).status, 416);
}

TEST(HttpCheck, PassingTroubleIsToldFromLastingTrouble) {
  for (const int status : {408, 429, 500, 502, 503, 504, 599})
    EXPECT_TRUE(failure_of_status(response_of(status, {}), "").transient) << status;
  for (const int status : {400, 401, 403, 404, 410, 412, 416, 501, 505})
    EXPECT_FALSE(failure_of_status(response_of(status, {}), "").transient) << status;
  EXPECT_EQ(failure_of_status(response_of(404, {}), "").code, Errc::not_found);
  EXPECT_EQ(failure_of_status(response_of(403, {}), "").code, Errc::io);
  EXPECT_EQ(failure_of_status(response_of(503, {{"Retry-After", "3"}}), "").retry_after,
            std::chrono::seconds(3));
}

TEST(HttpCheck, OfAnErrorBodyOnlyTheS3CodeIsUsed) {
  const std::string body =
      "<Error><Code>SignatureDoesNotMatch</Code><StringToSign>secret</StringToSign></Error>";
  const HttpFailure failure = failure_of_status(response_of(403, {}), body);
  EXPECT_NE(failure.reason.find("SignatureDoesNotMatch"), std::string::npos);
  EXPECT_EQ(failure.reason.find("secret"), std::string::npos);
  EXPECT_EQ(failure_of_status(response_of(403, {}), "<Code>a b</Code>").reason,
            "HTTP/1.1 403 Text");
}

TEST(HttpUrl, WhatIsShownHasNeitherCredentialsNorQuery) {
  const HttpUrl url =
      HttpUrl::parse("https://user:p%40ss@host.example:8443/a/b?X-Amz-Signature=secret#part");
  EXPECT_EQ(url.shown, "https://host.example:8443/a/b");
  EXPECT_EQ(url.text, "https://host.example:8443/a/b?X-Amz-Signature=secret");
  EXPECT_EQ(url.origin, "https://host.example:8443");
  EXPECT_EQ(url.user, "user");
  EXPECT_EQ(url.password, "p@ss");
}

TEST(HttpUrl, HostsAreTheSameWhateverTheirCase) {
  const HttpUrl url = HttpUrl::parse("http://u:p@Host.Example/A");
  EXPECT_EQ(url.origin, HttpUrl::parse("HTTP://HOST.example:80/b").origin);
  EXPECT_EQ(url.text, "http://Host.Example/A");
  const auto same = url.resolve("http://hOST.eXAMPLE/B");
  ASSERT_TRUE(same);
  EXPECT_EQ(same->user + ":" + same->password, "u:p");
  for (const char* other :
       {"http://Host.Example:8080/B", "https://Host.Example/B", "http://Host.Example.org/B"}) {
    const auto led_to = url.resolve(other);
    ASSERT_TRUE(led_to) << other;
    EXPECT_FALSE(led_to->has_credentials()) << other;
  }
}

TEST(HttpUrl, TheNamesOfFoldersAboveAreResolvedExceptInWhatWasSigned) {
  const std::string text = "http://h/a/../b/./c?q=/../1";
  EXPECT_EQ(HttpUrl::parse(text).path_and_query, "/b/c?q=/../1");
  EXPECT_EQ(HttpUrl::parse(text, true).path_and_query, "/a/../b/./c?q=/../1");
  EXPECT_EQ(HttpUrl::parse(text, true).text, text);
}

TEST(HttpUrl, TheDefaultPortIsPartOfTheOrigin) {
  EXPECT_EQ(HttpUrl::parse("http://h/x").origin, HttpUrl::parse("http://h:80/y").origin);
  EXPECT_NE(HttpUrl::parse("http://h/x").origin, HttpUrl::parse("https://h/x").origin);
}

TEST(HttpUrl, WhatIsNoHttpUrlIsRefusedWithoutBeingQuoted) {
  for (const std::string text : {"", "h/x", "ftp://secret/x", "http://", "http://a b/secret",
                                 "file:///etc/secret", "http://h/x\nsecret"}) {
    try {
      HttpUrl::parse(text);
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find("secret"), std::string::npos);
    }
  }
}

TEST(HttpUrl, RedirectsKeepCredentialsForTheirOriginAlone) {
  const HttpUrl url = HttpUrl::parse("http://u:p@h:81/a/b?q=1");
  const auto same = url.resolve("../c?d=2");
  ASSERT_TRUE(same);
  EXPECT_EQ(same->text, "http://h:81/c?d=2");
  EXPECT_TRUE(same->has_credentials());
  const auto other_port = url.resolve("http://h:82/c");
  ASSERT_TRUE(other_port);
  EXPECT_FALSE(other_port->has_credentials());
  const auto with_own = url.resolve("http://x:y@elsewhere/c");
  ASSERT_TRUE(with_own);
  EXPECT_FALSE(with_own->has_credentials());
  EXPECT_EQ(with_own->text, "http://elsewhere/c");
}

TEST(HttpUrl, RedirectsLeaveNeitherHttpsNorHttp) {
  EXPECT_FALSE(HttpUrl::parse("https://h/a").resolve("http://h/a"));
  EXPECT_TRUE(HttpUrl::parse("http://h/a").resolve("https://h/a"));
  EXPECT_FALSE(HttpUrl::parse("http://h/a").resolve("file:///etc/passwd"));
  EXPECT_FALSE(HttpUrl::parse("http://h/a").resolve("ftp://h/a"));
}

TEST(ScatterCursor, BytesLandAcrossBuffersAndNeverBeyondThem) {
  std::vector<std::byte> memory(10, std::byte{0xee});
  const std::vector<Buffer> buffers{Buffer(memory).subspan(1, 2), Buffer(memory).subspan(3, 0),
                                    Buffer(memory).subspan(5, 3)};
  const std::vector<std::byte> input{std::byte{1}, std::byte{2}, std::byte{3},
                                     std::byte{4}, std::byte{5}, std::byte{6}};
  ScatterCursor cursor(buffers, 1);
  EXPECT_EQ(cursor.room(), 4u);
  EXPECT_EQ(cursor.put(std::span(input).first(2)), 2u);
  EXPECT_EQ(cursor.put(std::span(input).subspan(2)), 2u);
  EXPECT_EQ(cursor.room(), 0u);
  const std::vector<int> expected{0xee, 0xee, 1, 0xee, 0xee, 2, 3, 4, 0xee, 0xee};
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(static_cast<int>(memory[i]), expected[i]) << i;
}

TEST(CurlErrors, BrokenConnectionsAreTriedAgainAndDistrustIsNot) {
  EXPECT_TRUE(failure_of_curl(CURLE_RECV_ERROR, "x").transient);
  EXPECT_TRUE(failure_of_curl(CURLE_COULDNT_CONNECT, "x").transient);
  EXPECT_TRUE(failure_of_curl(CURLE_PARTIAL_FILE, "x").transient);
  EXPECT_TRUE(failure_of_curl(CURLE_SSL_CONNECT_ERROR, "Connection reset by peer").transient);
  EXPECT_FALSE(failure_of_curl(CURLE_SSL_CONNECT_ERROR, "wrong version number").transient);
  EXPECT_FALSE(failure_of_curl(CURLE_PEER_FAILED_VERIFICATION, "x").transient);
  EXPECT_NE(failure_of_curl(CURLE_PEER_FAILED_VERIFICATION, "x").reason.find("cURL exit code 60"),
            std::string::npos);
}

}  // namespace
}  // namespace tensorizer::io
