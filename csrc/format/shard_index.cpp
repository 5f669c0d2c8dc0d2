#include "format/shard_index.h"

#include "core/error.h"
#include "format/tensor_path.h"

namespace tensorizer::format {

ShardIndex parse_shard_index(std::span<char> text) {
  if (text.size() > kMaxShardIndexNbytes)
    throw Error(Errc::malformed, "shard index: " + std::to_string(text.size()) +
                                     " bytes, at most " + std::to_string(kMaxShardIndexNbytes) +
                                     " are legal");
  JsonReader json(text, "shard index", 0);
  ShardIndex index;
  bool map_seen = false, metadata_seen = false;
  json.object("the index", [&](std::string_view member) {
    if (member == "weight_map") {
      if (map_seen) json.fail("weight_map occurs twice");
      map_seen = true;
      index.weight_map = read_text_object(json, "weight_map");
    } else if (member == "metadata" && !json.take_null()) {
      if (metadata_seen) json.fail("metadata occurs twice");
      metadata_seen = true;
      json.object("metadata", [&](std::string_view key) {
        if (json.next_is('"')) {
          index.metadata.push_back({key, json.string("metadata")});
        } else {
          json.skip_value();
        }
      });
    } else if (member != "metadata") {
      json.skip_value();
    }
  });
  json.finish();
  if (!map_seen) json.fail("it has no weight_map");
  return index;
}

}  // namespace tensorizer::format
