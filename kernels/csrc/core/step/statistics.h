// Row-wise optimizer state of tables that are cut into columns (PROTOCOLS S7).
//
// Row-wise Adagrad needs the mean of g * g over a whole row, of which an owner has some columns only. So the owners of a
// row block's column blocks exchange the sums of squares of their columns, one float per row updated, and each adds them
// in block order: all hold the same statistic, and the sums are those of the same numbers whatever the placement.
//
// Nothing is said about which rows these are: all owners of a row block are asked for the same ids by the same ranks in
// the same order, so the sizes of the messages follow from what each was asked for itself. A message begins with a hash
// of the ids it is about, in order: one that is about others is refused.
#pragma once

#include <cstdint>
#include <vector>

#include "core/step/apply.h"
#include "core/step/held.h"

namespace shoal::step {

class SharedStatistics {
 public:
  explicit SharedStatistics(StepPlan* plan);
  SharedStatistics(const SharedStatistics&) = delete;
  SharedStatistics& operator=(const SharedStatistics&) = delete;

  // Sums the gradients of the step's rows of all tables that share a statistic, decay included; the memory that they are
  // read from is not needed afterwards. Returns what this rank will send to and receive from each rank, in bytes.
  void collect(Updater* updater, int64_t* bytes_out, int64_t* bytes_in);
  // The same of gradients that have been summed already; what is held of these tables is taken.
  void collect(HeldGradients* held, int64_t* bytes_out, int64_t* bytes_in);
  void write(const int64_t* destinations) const;
  // Updates the rows; the store's step is open. Throws ProtocolViolation, before any row changes, where a message is
  // about other rows than this rank's.
  void apply(const int64_t* sources, uint32_t step, const float* lrs);

 private:
  // The rows of one column block (a table) that an exchange is about.
  struct Rows {
    BlockGradients sums;
    std::vector<float> squares;          // [rows] sum of g * g over the block's columns
    std::vector<uint64_t> block_hashes;  // [row blocks] of the ids, in order
    std::vector<float> means;            // [rows] of g * g over the logical table's columns
  };
  // A row block of a column block in a message; its rows are those of this rank's table `mine`.
  struct Part {
    int table;
    uint32_t block;
    int mine;
  };

  int64_t num_rows(const Part& part) const;
  int64_t message_bytes(const std::vector<Part>& parts) const;
  uint64_t message_hash(const std::vector<Part>& parts) const;
  void square(int table);
  void count_bytes(int64_t* bytes_out, int64_t* bytes_in) const;
  void read(const int64_t* sources);
  void add_up(int table, const std::vector<int>& group);
  void update(int table, uint32_t step, float lr);

  StepPlan* plan_;
  std::vector<std::vector<int>> groups_;  // tables of each logical table, in column order
  std::vector<std::vector<Part>> out_, in_;  // [world]
  std::vector<Rows> rows_;                // [tables]
  std::vector<std::vector<const float*>> squares_;  // [tables][row blocks] of any owner, once they are here
};

}  // namespace shoal::step
