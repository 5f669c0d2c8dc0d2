# shellcheck shell=bash
# To be sourced in the root of the checkout: git trusts it there whoever owns it, as in a container where the files
# belong to another user. What a caller set by GIT_CONFIG_COUNT stays.
count=${GIT_CONFIG_COUNT:-0}
export "GIT_CONFIG_KEY_$count=safe.directory" "GIT_CONFIG_VALUE_$count=$(pwd -P)" GIT_CONFIG_COUNT=$((count + 1))
unset count
