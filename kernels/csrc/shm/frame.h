// Layout, writing and checking of the frames of one exchange (PROTOCOLS S10); the Python face and the readable
// reference are kernels/frame.py.
#pragma once

#include <cstdint>

namespace shoal {

// Little-endian, no padding; the first 64 bytes of every message.
struct FramePrefix {
  uint32_t magic;
  uint16_t kind;
  uint16_t num_sections;
  uint32_t epoch;
  int32_t status;
  int64_t step;
  int64_t applied;
  int64_t section_bytes;  // Sum over the sections.
  uint64_t plan_hash;
  uint64_t sections_hash;  // Of each section's size, in order.
  uint32_t sender;
  uint32_t sequence;  // Number of this exchange within the epoch, modulo 2^32.
};
static_assert(sizeof(FramePrefix) == 64, "the prefix is 64 bytes on the wire");

constexpr uint32_t kFrameMagic = 0x4C484F53;           // "SOHL"
constexpr uint64_t kTrailerMagic = 0x5245544C414F4853;  // Mixed with the sequence number.
constexpr int64_t kAlign = 64;

inline int64_t align_up(int64_t n) { return (n + kAlign - 1) & ~(kAlign - 1); }

// sections: int64 [S, W]. offsets: int64 [S, W], of each section from the start of its frame. sizes: int64 [W].
void frame_layout(const int64_t* sections, int64_t num_sections, int64_t world, int64_t* offsets, int64_t* sizes);

// Writes prefix and trailer of the frame to each rank; bases: address of each frame.
void frame_write(const FramePrefix& common, const int64_t* bases, const int64_t* sections, int64_t num_sections,
                 int64_t world, const int64_t* sizes);

// What a received frame got wrong first; `field` indexes kFrameFields, -1 when every frame is right.
struct FrameFault {
  int64_t rank = -1;
  int field = -1;
  uint64_t got = 0;
  uint64_t expected = 0;
};

// Checks the frame from each rank against `common` and the agreed section sizes; fills statuses and applied (int64 [W]).
FrameFault frame_check(const FramePrefix& common, const int64_t* bases, const int64_t* sections, int64_t num_sections,
                       int64_t world, const int64_t* sizes, int64_t* statuses, int64_t* applied);

// Header messages (S1): copies `header_bytes` of the template to each address and writes the section byte totals, which
// alone differ by destination, at `sections_offset`.
void header_write(const int64_t* bases, const void* header, int64_t header_bytes, int64_t sections_offset,
                  const int64_t* sections, int64_t num_sections, int64_t world);

// Where the fields of a header lie, in 8-byte words; kernels/frame.py has the same as a numpy dtype.
struct HeaderLayout {
  static constexpr int64_t kWords = 64;
  static constexpr int64_t kAgreedWords = 11;  // These must be equal on all ranks.
  static constexpr int64_t kRank = 11, kApplied = 12, kAcked = 13, kFlags = 14, kStatus = 16, kDenominator = 17;
  static constexpr int64_t kSections = 18, kSectionsMax = 8;
};

// What W headers say together.
struct HeaderSummary {
  bool is_agreed = true;  // False: the agreed words differ, or a header does not come from the rank it should.
  bool has_bad_sections = false;
  int64_t applied_min = INT64_MAX;
  int64_t acked_min = INT64_MAX;
  uint64_t flags = 0;
  double denominator = 0.0;  // Summed in rank order.
};

// Copies the header at each address to `out` (int64 [W, 64]) and its section sizes to `sections` (int64 [S, W]).
HeaderSummary header_read(const int64_t* addresses, int64_t world, int64_t num_sections, int64_t section_bytes_max,
                          int64_t* out, int64_t* sections);

}  // namespace shoal
