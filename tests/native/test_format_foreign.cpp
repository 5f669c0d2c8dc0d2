// What other files are told to be: by their first bytes, however few there are.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bytes.h"
#include "format/prologue.h"

namespace tensorizer::format {
namespace {

using testing::Build;

std::string told(const std::string& text) {
  return std::string(foreign_format(Build().text(text).bytes()));
}

TEST(Foreign, KnownBeginningsAreNamed) {
  struct Case {
    std::string begin, word;
  };
  for (const Case& c : std::vector<Case>{
           {"<!DOCTYPE html><title>Sign in</title>", "HTML"},
           {"\n  <!doctype HTML>", "HTML"},
           {"\xEF\xBB\xBF<HTML lang=en>", "HTML"},
           {"<?xml version=\"1.0\"?><Error/>", "XML"},
           {"PK\x03\x04", "torch.load"},
           {"\x80\x02\x8A\x0Al\xFC\x9C\x46\xF9\x20j\xA8P\x19.", "torch.load"},
           {"\x1F\x8B\x08", "gzip"},
       }) {
    EXPECT_NE(told(c.begin).find(c.word), std::string::npos) << c.word << ": " << told(c.begin);
  }
}

TEST(Foreign, OtherBeginningsAreNot) {
  for (const std::string& begin :
       std::vector<std::string>{"", " ", "\xEF\xBB\xBF", "<", "PK", "not a tensors file", "\x1F",
                                "{\"a\": 1}", "|TZR", "version 1.2"})
    EXPECT_EQ(told(begin), "");
}

}  // namespace
}  // namespace tensorizer::format
