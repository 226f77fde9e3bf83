// A small pool of threads. Work is handed out as numbered tasks; which thread runs a task never changes a result,
// because every task writes memory of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace shoal::step {

class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { serve(i); });
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs task(index, thread) for every index in [0, num_tasks); tasks are taken in ascending order. The first
  // exception of a task is rethrown here after all threads have stopped.
  template <class Task>
  void run(int64_t num_tasks, Task&& task) {
    if (workers_.empty() || num_tasks <= 1) {
      for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
      return;
    }
    Job job{&task, [](void* t, int64_t i, int thread) { (*static_cast<std::remove_reference_t<Task>*>(t))(i, thread); },
            num_tasks};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      busy_ = static_cast<int>(workers_.size());
      ++round_;
    }
    wake_.notify_all();
    work(job, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  struct Job {
    void* task;
    void (*call)(void*, int64_t, int);
    int64_t num_tasks;
    std::atomic<int64_t> next{0};
    std::exception_ptr error;
    std::mutex error_mutex;
    Job(void* t, void (*c)(void*, int64_t, int), int64_t n) : task(t), call(c), num_tasks(n) {}
  };

  static void work(Job& job, int thread) {
    try {
      for (int64_t i; (i = job.next.fetch_add(1)) < job.num_tasks;) job.call(job.task, i, thread);
    } catch (...) {
      std::lock_guard<std::mutex> lock(job.error_mutex);
      if (!job.error) job.error = std::current_exception();
      job.next = job.num_tasks;
    }
  }

  void serve(int thread) {
    uint64_t seen = 0;
    for (;;) {
      Job* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || round_ != seen; });
        if (stop_) return;
        seen = round_;
        job = job_;
      }
      work(*job, thread);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t round_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

}  // namespace shoal::step
