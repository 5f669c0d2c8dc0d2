// What other files are told to be: by their first bytes, however few there are.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bytes.h"
#include "format/foreign.h"

namespace tensorizer::format {
namespace {

using namespace std::string_literals;
using testing::Build;
using testing::Bytes;

std::string told(const std::string& text) { return foreign_format(Build().text(text)); }

TEST(Foreign, known_beginnings_are_named) {
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
           {"\x40\0\0\0\0\0\0\0{\"a\":"s, "safetensors"},
       }) {
    EXPECT_NE(told(c.begin).find(c.word), std::string::npos) << c.word << ": " << told(c.begin);
  }
}

TEST(Foreign, other_beginnings_are_not) {
  for (const std::string& begin : std::vector<std::string>{
           "", " ", "\xEF\xBB\xBF", "<", "PK", "not a tensors file", "\x1F", "{\"a\": 1}", "|TZR",
           "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F{\"a\":", "\x40\0\0\0\0\0\0\0"s, "version 1.2"})
    EXPECT_EQ(told(begin), "");
}

TEST(Foreign, a_pointer_names_what_it_points_to_and_nothing_that_is_not_plain) {
  const std::string oid = "sha256:" + std::string(64, 'a');
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid " + oid + "\nsize 12345\n";
  EXPECT_NE(told(pointer).find(oid + " of 12345 bytes"), std::string::npos) << told(pointer);
  for (size_t n = 23; n < pointer.size() - 1; ++n) {
    ASSERT_TRUE(begins_lfs_pointer(Build().text(pointer.substr(0, n))));
    EXPECT_NE(told(pointer.substr(0, n)).find("of unknown bytes"), std::string::npos) << n;
  }
  EXPECT_EQ(told("version https://git-lfs\noid \x1b[31m\nsize 1 2\n"),
            "it is a Git LFS pointer to unknown of unknown bytes: `git lfs pull` fetches the file "
            "itself");
}

}  // namespace
}  // namespace tensorizer::format
