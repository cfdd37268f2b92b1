// A CUDA device made of threads, for PyTorch's CPU build: see __init__.py for what it is good for.
//
// Every stream is a queue with a thread of its own. An operator is launched: its outputs are allocated, and what it
// computes is left to the stream, which does it some time later on the CPU, in the order of the queue. Memory of the
// device is memory of its own, of a limited size.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// Before one operation of so many, as chance has it, a stream waits up to twice so many times so long, at its own pace.
std::atomic<int> delay_us{0};
constexpr int kEvery = 16, kPaces[] = {1, 0, 8};
std::mutex error_mutex;
std::string error;  // of the first operator that failed on the device

// Runs what may wait for a stream's thread without holding the interpreter up.
template <class Function>
void without_gil(const Function& function) {
  if (PyGILState_Check()) {
    py::gil_scoped_release release;
    function();
  } else {
    function();
  }
}

// A point in the work of a stream.
class Mark {
 public:
  void pass() {
    Lock lock(mutex_);
    passed_ = true;
    when_ = Clock::now();
    changed_.notify_all();
  }

  void wait() {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return passed_; });
  }

  bool has_passed() {
    Lock lock(mutex_);
    return passed_;
  }

  Clock::time_point when() const { return when_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point when_;
};

class Queue {
 public:
  explicit Queue(size_t number) : pace_(kPaces[number % 3]) { std::thread([this] { work(); }).detach(); }

  void submit(std::function<void()> task) {
    Lock lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  std::shared_ptr<Mark> mark() {
    auto mark = std::make_shared<Mark>();
    submit([mark] { mark->pass(); });
    return mark;
  }

  void wait() {
    without_gil([this] { mark()->wait(); });
    std::string found;
    {
      Lock lock(error_mutex);
      std::swap(found, error);  // told once: a process that tests goes on
    }
    TORCH_CHECK(found.empty(), "CUDA error: an operator failed on the device: ", found);
  }

 private:
  void work() {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    at::set_num_threads(1);
    std::minstd_rand random(reinterpret_cast<uintptr_t>(this) / 64);
    while (true) {
      std::function<void()> task;
      {
        Lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      int most = 2 * kEvery * pace_ * delay_us;
      if (most && random() % kEvery == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
      try {
        task();
      } catch (const std::exception& failure) {
        Lock lock(error_mutex);
        if (error.empty()) error = failure.what();
      }
    }
  }

  const int pace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
};

// Streams. Queues are never given back: their threads end with the process.
std::mutex streams_mutex;
std::vector<Queue*>& queues() {
  static auto* all = new std::vector<Queue*>{new Queue(0)};
  return *all;
}

Queue& queue_of(c10::StreamId stream) {
  Lock lock(streams_mutex);
  return *queues().at(stream);
}

thread_local c10::StreamId current_stream = 0;

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

c10::Stream stream_of(c10::StreamId stream) { return c10::Stream(c10::Stream::UNSAFE, kDevice, stream); }

c10::StreamId new_stream() {
  Lock lock(streams_mutex);
  queues().push_back(new Queue(queues().size()));
  return static_cast<c10::StreamId>(queues().size()) - 1;
}

void wait_for_all() {
  std::vector<Queue*> all;
  {
    Lock lock(streams_mutex);
    all = queues();
  }
  for (Queue* queue : all) queue->wait();
}

// Memory of the device, cut and kept as PyTorch's allocator does: what is freed serves the stream that it was allocated
// on again, and nobody else; at once, but where `record_stream` named others, after what they then had to do. What is
// used again is poisoned first: whoever reads it on another stream without having said so reads NaN.
constexpr size_t kUnit = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeSegment = 20 << 20, kLarge = 10 << 20,
                 kRound = 2 << 20;

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

struct Block {
  char* data;
  size_t size;
  c10::StreamId stream;
  bool small;
  bool used = true;
  Block *before = nullptr, *after = nullptr;  // in the same segment
  std::set<c10::StreamId> others = {};
  std::vector<std::shared_ptr<Mark>> until = {};
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->small, a->stream, a->size, a->data) < std::tie(b->small, b->stream, b->size, b->data);
  }
};

std::mutex memory_mutex;  // of all that follows
size_t total_bytes = size_t{8} << 30;
size_t allocated_bytes = 0, reserved_bytes = 0, most_allocated_bytes = 0, most_reserved_bytes = 0;
std::map<void*, Block*> used_blocks;
std::set<Block*, BySize> free_blocks;
std::vector<Block*> waiting_blocks;  // freed, but others may use them yet

void join(Block* block, Block* next) {
  block->size += next->size;
  block->after = next->after;
  if (next->after != nullptr) next->after->before = block;
  delete next;
}

void make_free(Block* block) {
  block->used = false;
  if (block->after != nullptr && !block->after->used) {
    free_blocks.erase(block->after);
    join(block, block->after);
  }
  if (block->before != nullptr && !block->before->used) {
    free_blocks.erase(block->before);
    block = block->before;
    join(block, block->after);
  }
  free_blocks.insert(block);
}

void free_what_has_passed() {
  std::vector<Block*> still;
  for (Block* block : waiting_blocks) {
    auto& marks = block->until;
    if (std::all_of(marks.begin(), marks.end(), [](const auto& mark) { return mark->has_passed(); })) {
      marks.clear();
      allocated_bytes -= block->size;
      make_free(block);
    } else {
      still.push_back(block);
    }
  }
  waiting_blocks = still;
}

// Gives whole segments back that nobody uses. With all streams idle.
void give_back() {
  free_what_has_passed();
  for (auto found = free_blocks.begin(); found != free_blocks.end();) {
    Block* block = *found;
    if (block->before == nullptr && block->after == nullptr) {
      found = free_blocks.erase(found);
      reserved_bytes -= block->size;
      std::free(block->data);
      delete block;
    } else {
      ++found;
    }
  }
}

void release(void* data) {
  Lock lock(memory_mutex);
  auto found = used_blocks.find(data);
  Block* block = found->second;
  used_blocks.erase(found);
  for (auto other : block->others) block->until.push_back(queue_of(other).mark());
  block->others.clear();
  if (!block->until.empty()) {
    waiting_blocks.push_back(block);
    return;
  }
  allocated_bytes -= block->size;
  make_free(block);
}

void use_on(void* data, c10::StreamId stream) {
  Lock lock(memory_mutex);
  auto found = used_blocks.find(data);
  if (found != used_blocks.end() && found->second->stream != stream) found->second->others.insert(stream);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (!wanted) return {nullptr, nullptr, &release, kDevice};
    size_t size = rounded(wanted, kUnit);
    char* data = find(size);
    if (data == nullptr) {
      wait_for_all();
      {
        Lock lock(memory_mutex);
        give_back();
      }
      data = find(size);
      TORCH_CHECK_WITH(OutOfMemoryError, data, "CUDA out of memory. Tried to allocate ", size, " bytes.");
    }
    queue_of(current_stream).submit([data, size] { std::memset(data, 0xff, size); });
    return {data, data, &release, kDevice};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t count) const override {
    wait_for_all();
    std::memcpy(to, from, count);
  }

 private:
  char* find(size_t size) {
    Lock lock(memory_mutex);
    free_what_has_passed();
    Block key{nullptr, size, current_stream, size <= kSmall};
    auto best = free_blocks.lower_bound(&key);
    Block* block = nullptr;
    if (best != free_blocks.end() && (*best)->small == key.small && (*best)->stream == current_stream) {
      block = *best;
      free_blocks.erase(best);
      block->used = true;
    } else {
      block = new_segment(size);
      if (block == nullptr) return nullptr;
    }
    size_t rest = block->size - size;
    if (block->small ? rest >= kUnit : rest > kSmall) {
      auto* other = new Block{block->data + size, rest, block->stream, block->small, false, block, block->after};
      if (block->after != nullptr) block->after->before = other;
      block->after = other;
      block->size = size;
      free_blocks.insert(other);
    }
    allocated_bytes += block->size;
    most_allocated_bytes = std::max(most_allocated_bytes, allocated_bytes);
    used_blocks[block->data] = block;
    return block->data;
  }

  Block* new_segment(size_t size) {
    size_t segment = size <= kSmall ? kSmallSegment : size < kLarge ? kLargeSegment : rounded(size, kRound);
    if (reserved_bytes + segment > total_bytes) return nullptr;
    reserved_bytes += segment;
    most_reserved_bytes = std::max(most_reserved_bytes, reserved_bytes);
    return new Block{static_cast<char*>(std::aligned_alloc(kUnit, segment)), segment, current_stream, size <= kSmall};
  }
};

std::map<const void*, size_t> pinned;

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::aligned_alloc(kUnit, rounded(size + 1, kUnit));
    Lock lock(memory_mutex);
    pinned[data] = size;
    return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
  }

  // What a stream still copies from or to is kept, as PyTorch does.
  static void free(void* data) {
    without_gil([] { wait_for_all(); });
    {
      Lock lock(memory_mutex);
      pinned.erase(data);
    }
    std::free(data);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // freeing waits for all streams
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data, size_t size) {
  Lock lock(memory_mutex);
  auto after = pinned.upper_bound(data);
  if (after == pinned.begin()) return false;
  auto [start, length] = *std::prev(after);
  return static_cast<const char*>(data) + size <= static_cast<const char*>(start) + length;
}

// Operators.
at::Tensor on_host(const at::Tensor& tensor) {
  auto view = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, tensor.options().device(at::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  return view;
}

struct DeviceGenerator;
at::Generator host_generator(const at::Generator& generator);

using Change = std::function<at::Tensor(const at::Tensor&)>;

// The arguments of an operator as another device's.
c10::IValue changed(const c10::IValue& value, const Change& change, at::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(tensor.defined() ? change(tensor) : tensor);
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      found.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    return found;
  }
  if (value.isDevice()) return device;
  if (value.isGenerator()) return host_generator(value.toGenerator());
  return value;
}

torch::jit::Stack all_changed(const torch::jit::Stack& args, const Change& change, at::Device device) {
  torch::jit::Stack found;
  for (const auto& value : args) found.push_back(changed(value, change, device));
  return found;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

at::Tensor empty_like_that(const at::Tensor& tensor) {
  return at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      tensor.scalar_type());
}

// Small operands on the CPU go with the launch; others are a mistake.
at::Tensor operand(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  if (tensor.is_cuda()) return on_host(tensor);
  auto name = op.schema().name();
  bool may_be_there = tensor.dim() == 0 || name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
  TORCH_CHECK(
      may_be_there, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
      tensor.device(), "! (when checking argument of ", name, ")");
  return tensor.clone();
}

// What an operator returns: fresh tensors, its own arguments, or something that only a finished operator knows.
enum class Kind { fresh, argument, value };

Kind kind_of(const c10::Argument& result) {
  if (result.alias_info() != nullptr) return Kind::argument;
  auto type = result.type()->str();
  return type == "Tensor" || type == "Tensor[]" ? Kind::fresh : Kind::value;
}

const c10::IValue& argument_like(
    const c10::FunctionSchema& schema, const torch::jit::Stack& args, const c10::Argument& result) {
  for (size_t number = 0; number < args.size(); ++number) {
    const auto* alias = schema.arguments()[number].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return args[number];
  }
  TORCH_CHECK(false, "the emulated device has no kernel for the view ", schema.name());
}

bool is_random(const torch::jit::Stack& args, const c10::FunctionSchema& schema) {
  for (size_t number = 0; number < args.size(); ++number)
    if (schema.arguments()[number].type()->str().find("Generator") != std::string::npos) return true;
  return schema.name() == "aten::native_dropout" || schema.name() == "aten::_fused_dropout";
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
}

// Whether an argument is only written (`out`). The CPU's kernel may give it several sizes on its way.
bool is_output(const c10::Argument& argument) {
  return argument.kwarg_only() && argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Statistics of norms have another dtype on a GPU, as shapes alone say, than what the CPU's backward wants.
bool is_norm(const std::string& name) { return name.find("_norm") != std::string::npos; }

// A GPU counts integers, too.
bool counts(const std::string& name) { return name == "aten::histc"; }

// The outputs of an operator that is yet to run, or nothing where only running it tells.
std::optional<torch::jit::Stack> outputs_ahead(const c10::OperatorHandle& op, const torch::jit::Stack& args) {
  const auto& schema = op.schema();
  if (is_random(args, schema) || is_norm(schema.name()) || counts(schema.name())) return std::nullopt;
  for (const auto& result : schema.returns())
    if (kind_of(result) == Kind::value) return std::nullopt;
  torch::jit::Stack found = all_changed(args, as_meta, at::kMeta);
  auto before = found;
  try {
    py::gil_scoped_acquire gil;  // some of them are written in Python
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &found);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (size_t number = 0; number < args.size(); ++number)
    if (schema.arguments()[number].alias_info() != nullptr && args[number].isTensor() &&
        args[number].toTensor().defined() &&
        before[number].toTensor().sizes() != args[number].toTensor().sizes())
      args[number].toTensor().resize_(before[number].toTensor().sizes());
  torch::jit::Stack outputs;
  for (size_t number = 0; number < found.size(); ++number) {
    const auto& result = schema.returns()[number];
    if (kind_of(result) == Kind::argument)
      outputs.push_back(argument_like(schema, args, result));
    else
      outputs.push_back(changed(found[number], empty_like_that, kDevice));
  }
  return outputs;
}

// What was computed at once, to where the stream will find it.
void copy_later(const at::Tensor& ours, const at::Tensor& made) {
  queue_of(current_stream).submit([to = on_host(ours), from = made]() mutable { to.copy_(from); });
}

at::Tensor to_device(const at::Tensor& made) {
  if (!made.defined()) return made;
  auto ours = empty_like_that(made);
  copy_later(ours, made);
  return ours;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto count = schema.arguments().size();
  torch::jit::Stack args(stack->end() - count, stack->end());
  auto& queue = queue_of(current_stream);
  auto ahead = outputs_ahead(op, args);
  torch::jit::Stack there = all_changed(args, [&](const at::Tensor& tensor) { return operand(op, tensor); }, at::kCPU);
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // as the CPU's kernel fills them, and ours
  for (size_t number = 0; number < count; ++number)
    if (is_output(schema.arguments()[number]) && args[number].isTensor()) {
      const auto& ours = args[number].toTensor();
      there[number] = at::empty({0}, ours.options().device(at::kCPU));
      outputs.emplace_back(there[number].toTensor(), ours);
    }
  stack->erase(stack->end() - count, stack->end());
  if (ahead) {
    std::vector<std::vector<at::Tensor>> targets;
    for (size_t number = 0; number < ahead->size(); ++number) {
      targets.emplace_back();
      if (kind_of(schema.returns()[number]) == Kind::fresh)
        for (const auto& tensor : tensors_of((*ahead)[number]))
          targets.back().push_back(tensor.defined() ? on_host(tensor) : tensor);
    }
    for (auto& [_, ours] : outputs) ours = on_host(ours);
    queue.submit([op, there, targets, outputs]() mutable {
      op.callBoxed(&there);
      for (auto& [made, ours] : outputs) ours.copy_(made);
      for (size_t number = 0; number < targets.size(); ++number) {
        auto made = tensors_of(there[number]);
        for (size_t part = 0; part < targets[number].size(); ++part)
          if (targets[number][part].defined()) targets[number][part].copy_(made[part]);
      }
    });
    stack->insert(stack->end(), ahead->begin(), ahead->end());
    return;
  }
  queue.wait();
  {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    if (counts(schema.name())) there[0] = there[0].toTensor().to(at::kDouble);
    op.callBoxed(&there);
  }
  for (auto& [made, ours] : outputs) {
    ours.resize_(made.sizes());
    copy_later(ours, made);
  }
  for (size_t number = 0; number < there.size(); ++number) {
    const auto& result = schema.returns()[number];
    if (kind_of(result) == Kind::argument) {
      stack->push_back(argument_like(schema, args, result));
      continue;
    }
    stack->push_back(changed(there[number], to_device, kDevice));
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (source.numel() == 0 && self.numel() == 0) return self;
  auto& queue = queue_of(current_stream);
  auto is_async = [&](const at::Tensor& host) {
    return non_blocking && is_pinned(host.data_ptr(), host.numel() * host.element_size());
  };
  // Pinned memory is read, and written, when the stream gets there; whoever writes it before has made a mistake. Other
  // memory is read before this returns, and written, too.
  bool reads_now = !source.is_cuda() && !is_async(source), writes_now = !self.is_cuda() && !is_async(self);
  queue.submit([to = on_host(self), from = reads_now ? source.clone() : on_host(source)]() mutable { to.copy_(from); });
  if (writes_now || (reads_now && !non_blocking)) queue.wait();
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  queue_of(current_stream).wait();
  return at::_local_scalar_dense(on_host(self));
}

// Of convolutions a GPU has several kinds, with operators of their own that the CPU has no kernels for.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  queue_of(current_stream).wait();
  at::NoGradGuard no_grad;
  auto added = bias && bias->defined() ? std::optional<at::Tensor>(on_host(*bias)) : std::nullopt;
  return to_device(at::convolution(
      on_host(input), on_host(weight), added, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  queue_of(current_stream).wait();
  at::NoGradGuard no_grad;
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(grad), on_host(input), on_host(weight), bias_sizes, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  return {to_device(of_input), to_device(of_weight), to_device(of_bias)};
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = (impl->storage_offset() + c10::multiply_integers(size)) * self.element_size();
  if (needed > self.storage().nbytes()) {
    auto data = device_allocator.allocate(needed);
    size_t kept = self.storage().nbytes();
    auto *to = static_cast<char*>(data.get()), *from = static_cast<char*>(self.storage().mutable_data());
    queue_of(current_stream).submit([to, from, kept] { if (kept) std::memcpy(to, from, kept); });
    self.storage().set_data_ptr(std::move(data));
    self.storage().set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) { use_on(self.storage().mutable_data(), stream.id()); }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("convolution", TORCH_FN(convolution));
  library.impl("convolution_backward", TORCH_FN(convolution_backward));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}

// Devices, streams and events as PyTorch asks for them.
struct Event {
  std::shared_ptr<Mark> mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(new_stream()); }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }

  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream.id()).mark()->has_passed(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream.id()).wait(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_all(); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->mark = queue_of(stream.id()).mark();
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr || !static_cast<Event*>(event)->mark) return;
    auto mark = static_cast<Event*>(event)->mark;
    queue_of(stream.id()).submit([mark] { mark->wait(); });
  }

  bool queryEvent(void* event) const override {
    return event == nullptr || !static_cast<Event*>(event)->mark || static_cast<Event*>(event)->mark->has_passed();
  }

  void synchronizeEvent(void* event) const override {
    if (event == nullptr || !static_cast<Event*>(event)->mark) return;
    auto mark = static_cast<Event*>(event)->mark;
    without_gil([&] { mark->wait(); });
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto passed = static_cast<Event*>(second)->mark->when() - static_cast<Event*>(first)->mark->when();
    return std::chrono::duration<double, std::milli>(passed).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on(data.get(), stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_allocator);
REGISTER_HOST_ALLOCATOR(at::kCUDA, &pinned_allocator);

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator host)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the emulated device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the emulated device's generator has no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(host.clone()); }

  at::Generator host;
};

at::Generator new_generator() {
  return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

at::Generator& default_generator() {
  static auto* generator = new at::Generator(new_generator());
  return *generator;
}

at::Generator host_generator(const at::Generator& generator) {
  if (generator.device().type() != c10::DeviceType::CUDA) return generator;
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data, 1); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
  void deviceSynchronize(DeviceIndex) const override { wait_for_all(); }
};

}  // namespace at

namespace {

// PyTorch has looked for CUDA when it was imported, and keeps what it found: an object without data, whose functions
// become ours.
void take_the_place_of_hooks() {
  static auto* ours = new at::CUDAHooks({});
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(kept) = *reinterpret_cast<void**>(ours);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  take_the_place_of_hooks();
  py::class_<Event>(module, "Event")
      .def(py::init<>())
      .def("record", [](Event& event, c10::StreamId stream) { event.mark = queue_of(stream).mark(); })
      .def("wait", [](Event& event, c10::StreamId stream) { Guard().block(&event, stream_of(stream)); })
      .def("query", [](Event& event) { return Guard().queryEvent(&event); })
      .def("synchronize", [](Event& event) { Guard().synchronizeEvent(&event); })
      .def("elapsed_time", [](Event& event, Event& end) { return Guard().elapsedTime(&event, &end, 0); });
  module.def("current_stream", [] { return current_stream; });
  module.def("set_stream", [](c10::StreamId stream) { current_stream = stream; });
  module.def("synchronize", &wait_for_all);
  module.def("sleep", [](double seconds) {
    queue_of(current_stream).submit([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  module.def("default_generator", [] {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator()));
  });
  module.def("set_delay", [](int microseconds) { delay_us = microseconds; });
  module.def("set_memory", [](size_t bytes) { total_bytes = bytes; });
  module.def("host_register", [](size_t address, size_t bytes) {
    Lock lock(memory_mutex);
    pinned[reinterpret_cast<const void*>(address)] = bytes;
    return 0;
  });
  module.def("host_unregister", [](size_t address) {
    Lock lock(memory_mutex);
    return pinned.erase(reinterpret_cast<const void*>(address)) ? 0 : 713;  // cudaErrorHostMemoryNotRegistered
  });
  module.def("memory", [] {
    Lock lock(memory_mutex);
    return py::make_tuple(total_bytes, allocated_bytes, reserved_bytes, most_allocated_bytes, most_reserved_bytes);
  });
  module.def("empty_cache", [] {
    wait_for_all();
    Lock lock(memory_mutex);
    give_back();
  });
  module.def("reset_peaks", [] {
    Lock lock(memory_mutex);
    most_allocated_bytes = allocated_bytes;
    most_reserved_bytes = reserved_bytes;
  });
}
