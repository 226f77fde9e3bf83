// Order-free checksums of rows: the sum, modulo 2^64, of one 64-bit hash per row over everything that a row is.
//
// A sum can be kept up to date: a change adds hash(new) - hash(old). The numpy twin is kernels/hashing.py. It guards
// against mistakes and corruption, not against malice.
#pragma once

#include <cstdint>
#include <vector>

#include "core/store/hash.h"
#include "core/store/record.h"

namespace shoal {

// Hashes rows of one width. The payload is the row's slots, then its weights, each as little-endian 64-bit words padded
// with zeros. Each word d meets a key k of its place: the sum of d + low32(d ^ k) * high32(d ^ k) costs one
// multiplication a word and vectorises; it is the multiply-and-add of UMAC's NH and of XXH3 (sources: RFC 4418 section
// 5.2; xxHash).
class RowHasher {
 public:
  RowHasher(size_t slot_bytes, size_t weight_bytes);
  // A record that exists.
  uint64_t hash(const std::byte* record) const {
    const RowHeader* head = header(record);
    const std::byte* slots = record + kHeaderBytes;
    return hash(head->id, head->last_step, head->state & kCountMask, slots, slots + slot_bytes_);
  }
  // The same row given as columns.
  uint64_t hash(int64_t id, int64_t last_step, int64_t count, const std::byte* slots, const std::byte* weights) const;

 private:
  const size_t slot_bytes_, weight_bytes_;
  std::vector<uint64_t> keys_;
};

}  // namespace shoal
