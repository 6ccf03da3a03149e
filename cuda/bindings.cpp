// The border between Python and the kernels: a Plan holds the tensors of one optimizer on one
// device, their table and their kernels. The only file that sees a torch header. Knows no
// arithmetic.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fusedopt.h"

#if defined(FUSEDOPT_CUDA)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace py = pybind11;

namespace fusedopt {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Messages are joined without streams: some toolchains link libstdc++ statically into a module, and
// streams of two copies of it do not work together.
std::string text(const char* part) { return part; }
std::string text(const py::handle& part) { return py::str(part).cast<std::string>(); }
std::string text(at::Device part) { return part.str(); }
std::string text(at::ScalarType part) { return c10::toString(part); }
std::string text(size_t part) { return std::to_string(part); }
std::string text(int64_t part) { return std::to_string(part); }
std::string text(at::IntArrayRef part) {
  std::string joined = "[";
  for (const int64_t number : part) joined += (joined.size() > 1 ? ", " : "") + text(number);
  return joined + "]";
}

template <class... Parts>
std::string message(const Parts&... parts) {
  return (std::string() + ... + text(parts));
}

template <class T>
T* pointer_or_null(const OptionalTensor& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

inline const at::DataPtr* place_of_address(const c10::TensorImpl& tensor) {
  return &tensor.unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

// As TensorImpl::data(), without its checks, which wait for one more cache line: what gather reads
// has been looked at before.
inline const void* address_of(const c10::TensorImpl& tensor, int64_t element_bytes) {
  return static_cast<const char*>(place_of_address(tensor)->get()) +
         tensor.storage_offset() * element_bytes;
}

// A tensor without memory of its own: around other tensors, or without numbers.
bool is_wrapper(const c10::TensorImpl& tensor) {
  return !tensor.has_storage() ||
         (tensor.key_set().has(c10::DispatchKey::Python) && tensor.numel() > 0 &&
          tensor.unsafe_storage().unsafeGetStorageImpl()->data() == nullptr);
}

// One number for sizes and strides: two tensors with the same are laid out alike.
inline uint64_t layout_key(const c10::TensorImpl& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  uint64_t key = sizes.size(), size_factor = 0x9e3779b97f4a7c15u, stride_factor = size_factor;
  for (size_t i = 0; i < sizes.size(); ++i) {  // a sum: no product waits for another one
    size_factor *= 0xd6e8feb86659fd93u;
    stride_factor *= 0xa0761d6478bd642fu;
    key += static_cast<uint64_t>(sizes[i]) * size_factor +
           static_cast<uint64_t>(strides[i]) * stride_factor;
  }
  return key;
}

// Elements lie in memory in the same order; the strides of dimensions of size 1 mean nothing.
bool same_layout(const c10::TensorImpl& a, const c10::TensorImpl& b) {
  const auto sizes = a.sizes();
  if (sizes != b.sizes()) return false;
  const auto a_strides = a.strides(), b_strides = b.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && a_strides[i] != b_strides[i]) return false;
  }
  return true;
}

// What a step looks at of each tensor, packed: reading a thousand of them is a matter of cache
// lines. A tensor without state is only watched: a gradient makes the plan stale.
struct Entry {
  c10::TensorImpl* param;  // has the gradient
  c10::TensorImpl* data;   // whose memory is updated
  const void* address;     // of data when the plan was made
  uint64_t layout;         // likewise
  const void* hints[2];    // what reading param and data will touch, for prefetching only
  caffe2::TypeMeta data_dtype, grad_dtype;
  uint16_t data_bytes, grad_bytes;  // of an element
  int32_t signature;                // -1: watched
  c10::VariableVersion version;     // the parameter's own; none of an inference tensor
};

// What a plan points to beside parameters, and its memory when the plan was made. The storage is
// not kept alive, so that memory can be given back; but no other one can get its place.
struct StateEntry {
  const c10::TensorImpl* tensor;
  const c10::StorageImpl* storage;
  const void* address;
};

// Bytes from where a device can fetch them without anybody waiting.
at::Tensor stage(const void* data, size_t bytes, at::Device device) {
  const auto options = at::TensorOptions(at::kByte).pinned_memory(device.is_cuda());
  const at::Tensor staging = at::empty({static_cast<int64_t>(bytes)}, options);
  std::memcpy(staging.data_ptr(), data, bytes);
  return staging;
}

at::Tensor to_device(const void* data, size_t bytes, at::Device device) {
  const at::Tensor staging = stage(data, bytes, device);
  return at::empty(staging.sizes(), at::TensorOptions(at::kByte).device(device))
      .copy_(staging, /*non_blocking=*/true);
}

void check(int error) {
#if defined(FUSEDOPT_CUDA)
  C10_CUDA_CHECK(static_cast<cudaError_t>(error));
#else
  TORCH_INTERNAL_ASSERT(error == 0);
#endif
}

// All tiles in one launch, or divided among CPU threads.
template <class Args, class F>
void for_tiles(const Args& args, F launch) {
#if defined(FUSEDOPT_CUDA)
  check(launch(args));
#else
  at::parallel_for(0, args.num_tiles, 4, [&](int64_t begin, int64_t end) {
    Args part = args;
    part.first_tile = begin;
    part.num_tiles = end - begin;
    check(launch(part));
  });
#endif
}

// The current stream of a device, made current for as long as this lives.
class Stream {
 public:
#if defined(FUSEDOPT_CUDA)
  explicit Stream(at::Device device)
      : guard_(device), stream_(c10::cuda::getCurrentCUDAStream(device.index())) {
    cudaStreamCaptureStatus status;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream_.stream(), &status));
    is_capturing_ = status != cudaStreamCaptureStatusNone;
  }
  void* get() const { return stream_.stream(); }
  bool is_capturing() const { return is_capturing_; }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  bool is_capturing_;
#else
  explicit Stream(at::Device) {}
  void* get() const { return nullptr; }
  bool is_capturing() const { return false; }
#endif
};

// The tiles of some tensors, and the TileIndex that finds a tile's tensor.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const std::vector<int64_t>& numels, int64_t tile_elements, at::Device device) {
    constexpr size_t kFanOut = TileIndex::kFanOut;
    std::vector<std::vector<uint32_t>> levels(1);
    for (const int64_t numel : numels) {
      levels[0].push_back(static_cast<uint32_t>(count));
      count += (numel + tile_elements - 1) / tile_elements;
      TORCH_CHECK(count < std::numeric_limits<int32_t>::max(),
                  message("more than 2^31 tiles of ", tile_elements, " elements"));
    }
    while (true) {
      auto& level = levels.back();
      level.resize((level.size() + kFanOut - 1) / kFanOut * kFanOut,
                   std::numeric_limits<uint32_t>::max());
      if (level.size() <= kFanOut) break;
      std::vector<uint32_t> coarser;
      for (size_t i = 0; i < level.size(); i += kFanOut) coarser.push_back(level[i]);
      levels.push_back(std::move(coarser));
    }
    TORCH_CHECK(levels.size() <= TileIndex::kMaxLevels,
                message(numels.size(), " tensors, at most 64^4"));
    std::vector<uint32_t> all;
    for (auto level = levels.rbegin(); level != levels.rend(); ++level) {
      index.offsets[index.levels++] = static_cast<int32_t>(all.size());
      all.insert(all.end(), level->begin(), level->end());
    }
    table_ = to_device(all.data(), all.size() * sizeof(uint32_t), device);
    index.starts = static_cast<const uint32_t*>(table_.data_ptr());
    index.first_tiles = index.starts + index.offsets[index.levels - 1];
    index.tensors = static_cast<int64_t>(levels[0].size());
  }

  TileIndex index = {};
  int64_t count = 0;

 private:
  at::Tensor table_;
};

// Words that kernels read on the device: sent when they changed. A captured graph sends its own at
// every replay, to a place of its own.
class WordsOnDevice {
 public:
  const uint64_t* send(const std::vector<uint64_t>& words, at::Device device, bool is_capturing,
                       std::vector<at::Tensor>& kept_for_graphs) {
    if (is_capturing || words != sent_) {
      const at::Tensor staging = stage(words.data(), words.size() * sizeof(uint64_t), device);
      if (is_capturing || !table_.defined() || table_.numel() != staging.numel()) {
        table_ = at::empty(staging.sizes(), at::TensorOptions(at::kByte).device(device));
      }
      sent_.clear();  // nothing is there if the copy fails
      table_.copy_(staging, /*non_blocking=*/true);
      sent_ = words;
      if (is_capturing) {
        kept_for_graphs.insert(kept_for_graphs.end(), {staging, table_});
        table_ = at::Tensor();
        sent_.clear();
        return reinterpret_cast<const uint64_t*>(kept_for_graphs.back().data_ptr());
      }
    }
    return reinterpret_cast<const uint64_t*>(table_.data_ptr());
  }

 private:
  at::Tensor table_;
  std::vector<uint64_t> sent_;
};

// The sum of squares of gradients, one fp64 number on the device. Its buffers are made before a
// capture, or else a graph would own them.
class SumOfSquares {
 public:
  void prepare(const Tiles& tiles, at::Device device) {
#if defined(FUSEDOPT_CUDA)
    const int64_t partials = kMaxNormBlocks;
#else
    const int64_t partials = tiles.count;
#endif
    const auto numbers = at::TensorOptions(at::kDouble).device(device);
    partials_ = at::empty({partials}, numbers);
    arrived_ = at::empty({1}, numbers.dtype(at::kInt)).zero_();
  }

  // args: rows, places, place_bytes.
  void operator()(Gradients args, const Tiles& tiles, const GradientKernels& kernels,
                  const OptionalTensor& found_inf, const Stream& stream,
                  const at::Tensor& total) const {
#if !defined(FUSEDOPT_CUDA)
    if (found_inf) found_inf->zero_();
#endif
    args.index = tiles.index;
    args.num_tiles = tiles.count;
    args.partials = partials_.data_ptr<double>();
    args.arrived = static_cast<uint32_t*>(arrived_.data_ptr());
    args.total = total.data_ptr<double>();
    args.found_inf = pointer_or_null<float>(found_inf);
    for_tiles(args, [&](const Gradients& part) { return kernels.norm(part, stream.get()); });
#if !defined(FUSEDOPT_CUDA)
    *args.total = 0;
    for (int64_t tile = 0; tile < tiles.count; ++tile) *args.total += args.partials[tile];
#endif
  }

 private:
  at::Tensor partials_, arrived_;
};

std::optional<GradientCode> gradient_code(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return GradientCode::kF32;
    case at::kBFloat16:
      return GradientCode::kBF16;
    case at::kHalf:
      return GradientCode::kF16;
    default:
      return std::nullopt;
  }
}

// What kernels need of some gradients but their addresses: made once for all lists of these sizes
// and dtypes that one stream works on.
struct GradientLayout {
  std::vector<TensorRow> rows;
  at::Tensor rows_table;
  Tiles tiles;
  SumOfSquares sum;
  WordsOnDevice places;
  std::vector<at::Tensor> kept;  // by captured graphs
  void* stream;
};

// Gradients that are summed up and clipped outside of a step.
class GradientList {
 public:
  GradientList(std::vector<at::Tensor> grads, std::shared_ptr<GradientLayout> layout,
               const GradientKernels& kernels, at::Device device)
      : grads_(std::move(grads)), layout_(std::move(layout)), kernels_(kernels), device_(device) {
    for (const at::Tensor& grad : grads_) {
      places_.push_back(reinterpret_cast<uint64_t>(grad.data_ptr()));
    }
  }

  at::Tensor norm_sq() {
    const at::Tensor total = at::empty({1}, at::TensorOptions(at::kDouble).device(device_));
    if (layout_->tiles.count == 0) return total.zero_();
    const Stream stream(device_);
    layout_->sum(arguments(stream), layout_->tiles, kernels_, std::nullopt, stream, total);
    return total;
  }

  // Scales them so that their norm, whose square is given, is at most max_norm.
  at::Tensor clip(const at::Tensor& norm_sq, double max_norm) {
    const at::Tensor norm = at::empty({}, at::TensorOptions(at::kFloat).device(device_));
    if (layout_->tiles.count == 0) return norm.copy_(norm_sq.sqrt().reshape({}));
    const Stream stream(device_);
    Gradients args = arguments(stream);
    args.index = layout_->tiles.index;
    args.num_tiles = layout_->tiles.count;
    args.total = norm_sq.data_ptr<double>();
    for_tiles(args, [&](const Gradients& part) {
      return kernels_.clip(part, static_cast<float>(max_norm), norm.data_ptr<float>(),
                           stream.get());
    });
    for (const at::Tensor& grad : grads_) {
      if (!grad.is_inference()) grad.unsafeGetTensorImpl()->bump_version();
    }
    return norm;
  }

 private:
  Gradients arguments(const Stream& stream) {
    if (!stream.is_capturing() || places_on_device_ == nullptr) {
      places_on_device_ =
          layout_->places.send(places_, device_, stream.is_capturing(), layout_->kept);
    }
    Gradients args = {};
    args.rows = static_cast<const TensorRow*>(layout_->rows_table.data_ptr());
    args.places = places_on_device_;
    args.place_bytes = sizeof(uint64_t);
    return args;
  }

  std::vector<at::Tensor> grads_;
  std::vector<uint64_t> places_;
  const uint64_t* places_on_device_ = nullptr;
  std::shared_ptr<GradientLayout> layout_;
  const GradientKernels& kernels_;
  at::Device device_;
};

// Makes GradientLists of one device and remembers their layouts.
class GradientLists {
 public:
  GradientLists(at::Device device, int64_t kernels)
      : device_(device), kernels_(*reinterpret_cast<const GradientKernels*>(kernels)) {}

  // Of what some parameters have as gradients. None, if that cannot be clipped here, or if one of
  // them is a wrapper around tensors.
  std::optional<GradientList> of(const std::vector<at::Tensor>& params) {
    std::vector<at::Tensor> grads;
    for (const at::Tensor& param : params) {
      const at::Tensor& grad = param.grad();
      if (!grad.defined()) continue;
      if (is_wrapper(*grad.unsafeGetTensorImpl())) return std::nullopt;
      grads.push_back(grad);
    }
    return make(std::move(grads));
  }

  // None, if one of them cannot be clipped here: another device, dtype or layout than dense fp32,
  // bf16 or fp16.
  std::optional<GradientList> make(std::vector<at::Tensor> grads) {
    std::vector<TensorRow> rows(grads.size(), TensorRow());
    for (size_t i = 0; i < grads.size(); ++i) {
      const at::Tensor& grad = grads[i];
      const auto code = gradient_code(grad.scalar_type());
      if (!code || grad.layout() != at::kStrided || grad.device() != device_ || grad.is_neg() ||
          !grad.is_non_overlapping_and_dense()) {
        return std::nullopt;
      }
      rows[i].numel = grad.numel();
      rows[i].grad_code = *code;
    }
    return GradientList(std::move(grads), layout_of(std::move(rows)), kernels_, device_);
  }

 private:
  static constexpr size_t kMost = 16;

  std::shared_ptr<GradientLayout> layout_of(std::vector<TensorRow> rows) {
    const Stream stream(device_);
    const auto is_it = [&](const std::shared_ptr<GradientLayout>& layout) {
      return (stream.is_capturing() || layout->stream == stream.get()) &&
             std::equal(rows.begin(), rows.end(), layout->rows.begin(), layout->rows.end(),
                        [](const TensorRow& a, const TensorRow& b) {
                          return a.numel == b.numel && a.grad_code == b.grad_code;
                        });
    };
    const auto known = std::find_if(layouts_.begin(), layouts_.end(), is_it);
    if (stream.is_capturing()) {  // from now on it is for graphs, which are not replayed at once
      if (known != layouts_.end()) {
        captured_.push_back(*known);
        layouts_.erase(known);
        return captured_.back();
      }
      const auto before = std::find_if(captured_.begin(), captured_.end(), is_it);
      TORCH_CHECK(before != captured_.end(),
                  "clip_grad_norm_() sees these gradients for the first time while a CUDA graph is "
                  "captured: call it once before");
      return *before;
    }
    if (known != layouts_.end()) {
      std::rotate(layouts_.begin(), known, known + 1);  // the last used one is the first
      return layouts_.front();
    }
    const auto made = std::make_shared<GradientLayout>();
    std::vector<int64_t> numels;
    for (const TensorRow& row : rows) numels.push_back(row.numel);
    made->rows_table = to_device(rows.data(), rows.size() * sizeof(TensorRow), device_);
    made->tiles = Tiles(numels, kernels_.tile_elements, device_);
    made->sum.prepare(made->tiles, device_);
    made->rows = std::move(rows);
    made->stream = stream.get();
    layouts_.insert(layouts_.begin(), made);
    if (layouts_.size() > kMost) layouts_.pop_back();
    return made;
  }

  at::Device device_;
  const GradientKernels& kernels_;
  std::vector<std::shared_ptr<GradientLayout>> layouts_, captured_;
};

class Plan {
 public:
  // kernels: the address that each signature's fusedopt_kernels() gave. structure: the keys of a
  // group that decide which states and signatures there are.
  Plan(at::Device device, py::tuple hyperparameters, py::tuple structure, const py::list& groups,
       std::vector<int64_t> kernels, uint32_t seed)
      : device_(device),
        keys_(std::move(hyperparameters)),
        structure_keys_(std::move(structure)),
        seed_(seed) {
    structure_ = read_structure(groups);
    groups_used_.assign(groups.size(), false);
    for (const int64_t address : kernels) {
      kernels_.push_back(reinterpret_cast<const Kernels*>(address));
      TORCH_CHECK(kernels_.back()->ready_bytes == kernels_.front()->ready_bytes &&
                      kernels_.back()->hyperparameters == kernels_.front()->hyperparameters,
                  "all signatures of a plan must share one rule");
    }
  }

  void watch(const at::Tensor& param) { add_entry(param, param, {}, param.scalar_type(), -1); }

  // data holds the parameter's numbers, mostly it is param. scales[i] is null unless states[i] is
  // block-scaled; scaling is (scale, amax, scale_inv) of an fp8 parameter and fp8_largest the
  // largest finite number of its dtype (0: its scale is not ours to choose).
  void add(const at::Tensor& param, const at::Tensor& data, at::ScalarType grad_dtype,
           const at::Tensor& step, const std::vector<at::Tensor>& states,
           const std::vector<OptionalTensor>& scales, const OptionalTensor& master,
           const OptionalTensor& master_scale, const std::vector<at::Tensor>& scaling,
           double fp8_largest, int64_t group, int64_t signature) {
    TORCH_CHECK(states.size() <= kMaxStates && scales.size() == states.size(),
                message("got ", states.size(), " states and ", scales.size(), " scales, at most ",
                        int64_t{kMaxStates}));
    TORCH_CHECK(signature >= 0 && signature < static_cast<int64_t>(kernels_.size()),
                message("signature ", signature, " of ", kernels_.size()));
    TensorRow row = {};
    row.param = data.data_ptr();
    row.numel = data.numel();
    const auto keep = [&](const at::Tensor& tensor, const char* name) {
      TORCH_CHECK(tensor.device() == device_,
                  message(name, " lies on ", tensor.device(), ", expected ", device_));
      kept_.push_back(tensor);
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      storages_.push_back(tensor.storage().getWeakStorageImpl());
      states_.push_back(
          {impl, tensor.storage().unsafeGetStorageImpl(), address_of(*impl, tensor.itemsize())});
    };
    keep(step, "step");
    row.step = scalar_pointer(step, "step");
    const auto keep_elements = [&](const at::Tensor& tensor, const char* name) {
      keep(tensor, name);
      TORCH_CHECK(
          same_layout(*tensor.unsafeGetTensorImpl(), *data.unsafeGetTensorImpl()),
          message(name, " has sizes ", tensor.sizes(), " and strides ", tensor.strides(),
                  ", expected those of its parameter: ", data.sizes(), " and ", data.strides()));
      return tensor.data_ptr();
    };
    const auto keep_scales = [&](const OptionalTensor& scale, const char* name) {
      if (!scale) return static_cast<float*>(nullptr);
      keep(*scale, name);
      const int64_t blocks = (data.numel() + kScaleBlock - 1) / kScaleBlock;
      TORCH_CHECK(scale->is_contiguous() && scale->numel() == blocks,
                  message(name, " have sizes ", scale->sizes(), " and strides ", scale->strides(),
                          ", expected ", blocks, " contiguous numbers"));
      return scale->data_ptr<float>();
    };
    for (size_t i = 0; i < states.size(); ++i) {
      row.states[i] = keep_elements(states[i], "a state");
      row.state_scales[i] = keep_scales(scales[i], "a state's scales");
    }
    if (master) row.master = keep_elements(*master, "the master");
    row.master_scale = keep_scales(master_scale, "the master's scales");
    if (!scaling.empty()) {
      for (const auto& tensor : scaling) keep(tensor, "an fp8 scale");
      row.fp8_scale = scaling.at(0).data_ptr<float>();
      row.fp8_amax = scaling.at(1).data_ptr<float>();
      row.fp8_scale_inv = scaling.at(2).data_ptr<float>();
      row.fp8_largest = static_cast<float>(fp8_largest);
    }
    row.group = static_cast<int32_t>(group);
    groups_used_.at(group) = true;
    row.grad_code = gradient_code(grad_dtype).value();
    add_entry(param, data, row, grad_dtype, signature);
  }

  // Lays out tiles and puts the table on the device.
  void seal() {
    if (kernels_.empty()) return;
    signature_used_.assign(kernels_.size(), false);
    for (size_t s = 0; s < kernels_.size(); ++s) {
      std::vector<int64_t> numels;
      for (size_t i = 0; i < entries_.size(); ++i) {
        numels.push_back(entries_[i].signature == static_cast<int32_t>(s) ? rows_[i].numel : 0);
      }
      tiles_.emplace_back(numels, kernels_[s]->tile_elements, device_);
    }
    rows_table_ = to_device(rows_.data(), rows_.size() * sizeof(TensorRow), device_);
    ready_ = at::empty({static_cast<int64_t>(entries_.size()) * kernels_.front()->ready_bytes},
                       at::TensorOptions(at::kByte).device(device_));
  }

  // Reads every gradient: p.grad, or grads[i] where a list is given. False: the plan no longer fits
  // (or a gradient is bad), nothing was changed, and Python has to look.
  bool gather(const py::object& grads) {
    gathered_ = 0;
    copies_.clear();
    std::fill(signature_used_.begin(), signature_used_.end(), false);
    if (!grads.is_none()) {
      given_ = py::cast<std::vector<OptionalTensor>>(grads);
      TORCH_CHECK(
          given_.size() == entries_.size(),
          message("got ", given_.size(), " gradients for ", entries_.size(), " parameters"));
    }
    // Three short passes instead of a long one keep many cache misses in flight.
    for (size_t begin = 0; begin < entries_.size(); begin += kAtOnce) {
      const size_t end = std::min(begin + kAtOnce, entries_.size());
      find_gradients(begin, end, grads.is_none());
      if (!are_as_planned(begin, end) || !read_addresses(begin, end)) return false;
    }
    return states_are_in_place();
  }

  // Whether groups still ask for the states and signatures that the plan was made for.
  bool fits(const py::list& groups) const {
    size_t objects = 0, lists = 0, tensors = 0, numbers = 0;
    if (static_cast<size_t>(groups.size()) != structure_.params.size()) return false;
    const bool same = visit_structure(
        groups,
        [&](PyObject* object) {
          return objects < structure_.objects.size() &&
                 structure_.objects[objects++].ptr() == object;
        },
        [&](PyObject* params) {
          const py::handle before = structure_.params[lists++];
          const Py_ssize_t size = PyList_GET_SIZE(params);
          if (size != PyTuple_GET_SIZE(before.ptr())) return false;
          PyObject** now = PySequence_Fast_ITEMS(params);
          PyObject** then = PySequence_Fast_ITEMS(before.ptr());
          for (Py_ssize_t i = 0; i < size; ++i) {
            if (now[i] != then[i] ||
                THPVariable_Unpack(now[i]).unsafeGetTensorImpl() != structure_.tensors[tensors++]) {
              return false;
            }
          }
          return true;
        },
        [&](int64_t number) {
          return numbers < structure_.numbers.size() && structure_.numbers[numbers++] == number;
        });
    return same && objects == structure_.objects.size() && numbers == structure_.numbers.size();
  }

  // The usual step in one call. False, with nothing changed: Python has to look.
  bool step(const py::list& groups, std::optional<double> max_grad_norm,
            const OptionalTensor& grad_norm) {
    if (max_grad_norm && !(gradient_tiles_ && grad_norm)) return false;
    if (!fits(groups) || !gather(py::none())) return false;
    if (max_grad_norm && gathered_ == 0) return false;
    OptionalTensor sum;
    if (max_grad_norm) sum = norm_sq(groups, std::nullopt);
    launch(groups, std::nullopt, std::nullopt, sum, max_grad_norm.value_or(0), grad_norm);
    return true;
  }

  // The sum of squares of what was gathered, one fp64 number on the device. found_inf is set to
  // whether one of them is infinite or NaN.
  at::Tensor norm_sq(const py::list& groups, const OptionalTensor& found_inf) {
    TORCH_CHECK(gradient_tiles_, "norm_sq() before prepare_norm()");
    scalar_pointer(found_inf, "found_inf");
    if (gathered_ == 0 || gradient_tiles_->count == 0) {
      if (found_inf) found_inf->zero_();
      return norm_total_.zero_();
    }
    Advance args = {};
    args.place_only = true;
    const Stream stream(device_);
    advance(args, groups, stream);
    Gradients gradients = {};
    gradients.rows = args.rows;
    gradients.places = args.ready;  // a gradient's address is the first member
    gradients.place_bytes = kernels_.front()->ready_bytes;
    sum_(gradients, *gradient_tiles_, *gradient_kernels_, found_inf, stream, norm_total_);
    return norm_total_;
  }

  // What norm_sq() needs; to be made before a capture. kernels: the address that
  // fusedopt_gradient_kernels() gave.
  void prepare_norm(int64_t kernels) {
    if (gradient_tiles_) return;
    TORCH_CHECK(!Stream(device_).is_capturing(),
                "the first step with max_grad_norm is captured: run one before, or call "
                "init_state() after setting it");
    std::vector<int64_t> numels;
    for (const TensorRow& row : rows_) numels.push_back(row.numel);
    gradient_kernels_ = reinterpret_cast<const GradientKernels*>(kernels);
    Tiles tiles(numels, gradient_kernels_->tile_elements, device_);
    sum_.prepare(tiles, device_);
    norm_total_ = at::empty({1}, at::TensorOptions(at::kDouble).device(device_)).zero_();
    gradient_tiles_.emplace(std::move(tiles));
  }

  int64_t gathered() const { return gathered_; }

  // One step of what was gathered. With norm_sq, of all gradients wherever they are, they are
  // clipped to max_grad_norm and grad_norm gets their norm.
  void launch(const py::list& groups, const OptionalTensor& grad_scale,
              const OptionalTensor& found_inf, const OptionalTensor& norm_sq, double max_grad_norm,
              const OptionalTensor& grad_norm) {
    if (gathered_ == 0) return;
    Advance args = {};
    args.norm_sq = scalar_pointer<double>(norm_sq, "norm_sq");
    args.max_grad_norm = static_cast<float>(max_grad_norm);
    args.grad_norm = scalar_pointer(grad_norm, "grad_norm");
    args.grad_scale = scalar_pointer(grad_scale, "grad_scale");
    args.found_inf = scalar_pointer(found_inf, "found_inf");
    const Stream stream(device_);
    advance(args, groups, stream);
    for (size_t i = 0; i < kernels_.size(); ++i) {
      if (!signature_used_[i] || tiles_[i].count == 0) continue;
      const Update update = {args.rows, args.ready, tiles_[i].index, 0, tiles_[i].count};
      for_tiles(update,
                [&](const Update& part) { return kernels_[i]->update(part, stream.get()); });
    }
    // Raw pointers do not tell autograd that a tensor changed. Locked additions wait for each
    // other's cache misses; the reads before them do not.
    for (size_t begin = 0; begin < entries_.size(); begin += kAtOnce) {
      const size_t end = std::min(begin + kAtOnce, entries_.size());
      uint32_t versions = 0;
      for (size_t i = begin; i < end; ++i) {
        if (entries_[i].version.enabled()) versions += entries_[i].version.current_version();
      }
      asm volatile("" ::"r"(versions));  // so that they are read
      for (size_t i = begin; i < end; ++i) {
        if (grads_[i] && entries_[i].version.enabled()) entries_[i].version.bump();
      }
    }
    copies_.clear();
    given_.clear();
  }

  bool has_norm() const { return gradient_tiles_.has_value(); }
  bool captured() const { return captured_; }

 private:
  static constexpr size_t kAtOnce = 32;  // entries: they stay in the L1 cache from pass to pass

  // What gather reads of a tensor lies between its storage and its keys, on three or four lines.
  static void prefetch(const c10::TensorImpl* tensor) {
    const auto* bytes = reinterpret_cast<const char*>(tensor);
    for (const size_t offset : {16, 80, 144, 175}) __builtin_prefetch(bytes + offset);
  }

  // The passes of gather(), each with the processor's registers to itself.

  __attribute__((noinline)) void find_gradients(size_t begin, size_t end, bool are_of_params) {
    constexpr size_t kAhead = 16;
    for (size_t i = begin; i < end; ++i) {
      if (!are_of_params) {
        grad_impls_[i] = given_[i] ? given_[i]->unsafeGetTensorImpl() : nullptr;
        continue;
      }
      const Entry& later = entries_[std::min(i + kAhead, entries_.size() - 1)];
      prefetch(later.param);
      __builtin_prefetch(later.hints[0]);
      __builtin_prefetch(later.hints[1]);
      const at::Tensor& grad = static_cast<const c10::TensorImpl*>(entries_[i].param)->grad();
      grad_impls_[i] = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
      prefetch(grad_impls_[i]);
    }
  }

  __attribute__((noinline)) bool are_as_planned(size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Entry& entry = entries_[i];
      const c10::TensorImpl* grad = grad_impls_[i];
      if (grad == nullptr) continue;
      if (grad->key_set() != plain_keys_) {
        if (grad->layout() != at::kStrided || is_wrapper(*grad)) return false;
        if (!is_lazy(*grad) && !grad->key_set().has(c10::DispatchKey::Python)) {
          plain_keys_ = grad->key_set();
        }
      }
      if (entry.signature < 0 || grad->dtype() != entry.grad_dtype || grad->device() != device_ ||
          entry.data->dtype() != entry.data_dtype || layout_key(*entry.data) != entry.layout) {
        return false;
      }
      __builtin_prefetch(place_of_address(*grad));
    }
    return true;
  }

  __attribute__((noinline)) bool read_addresses(size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Entry& entry = entries_[i];
      c10::TensorImpl* grad = grad_impls_[i];
      grads_[i] = nullptr;
      if (grad == nullptr) continue;
      if (address_of(*entry.data, entry.data_bytes) != entry.address) return false;
      if (layout_key(*grad) == entry.layout && grad->key_set() == plain_keys_) {
        grads_[i] = address_of(*grad, entry.grad_bytes);
      }
      if (grads_[i] == nullptr) {
        if (grad->sizes() != entry.data->sizes()) return false;
        grads_[i] = address_in_order(grad, entry);
        if (grads_[i] == nullptr) return false;  // its memory was taken away
      }
      ++gathered_;
      signature_used_[entry.signature] = true;
    }
    return true;
  }

  void advance(Advance& args, const py::list& groups, const Stream& stream) {
    captured_ = captured_ || stream.is_capturing();
    read_groups(groups);
    args.rows = static_cast<const TensorRow*>(rows_table_.data_ptr());
    args.ready = ready_.data_ptr();
    args.seed = seed_;
    args.tensors = static_cast<int32_t>(entries_.size());
    args.groups = static_cast<int32_t>(groups.size());
    const auto* grads = reinterpret_cast<const uint64_t*>(grads_.data());
    words_.insert(words_.end(), grads, grads + grads_.size());
    const auto num_words = static_cast<int32_t>(words_.size());
    // Thousands of tensors: their words do not fit into a launch.
    const bool far = num_words > kernels_.front()->max_words;
    const uint64_t* words =
        far ? words_on_device_.send(words_, device_, stream.is_capturing(), kept_) : words_.data();
    check(kernels_.front()->advance(args, words, num_words, stream.get()));
  }

  int64_t group_size() const { return 1 + kernels_.front()->hyperparameters; }

  void add_entry(const at::Tensor& param, const at::Tensor& data, const TensorRow& row,
                 at::ScalarType grad_dtype, int64_t signature) {
    TORCH_CHECK(data.device() == device_,
                message("a parameter lies on ", data.device(), ", expected ", device_));
    // The parameter itself is kept by its Python object, which fits() compares, and not here:
    // torch.utils.swap_tensors() wants nobody else to.
    if (!data.is_same(param)) kept_.push_back(data);
    Entry entry = {};
    entry.param = param.unsafeGetTensorImpl();
    entry.data = data.unsafeGetTensorImpl();
    entry.data_bytes = static_cast<uint16_t>(c10::elementSize(data.scalar_type()));
    entry.grad_bytes = static_cast<uint16_t>(c10::elementSize(grad_dtype));
    entry.address = address_of(*entry.data, entry.data_bytes);
    entry.layout = layout_key(*entry.data);
    entry.hints[0] = &static_cast<const c10::TensorImpl*>(entry.param)->grad();
    entry.hints[1] = place_of_address(*entry.data);
    entry.data_dtype = data.dtype();
    entry.grad_dtype = c10::scalarTypeToTypeMeta(grad_dtype);
    entry.signature = static_cast<int32_t>(signature);
    entry.version = entry.param->version_counter();
    entries_.push_back(entry);
    rows_.push_back(row);
    grads_.push_back(nullptr);
    grad_impls_.push_back(nullptr);
  }

  // Whether nobody gave a state other memory, as `state.data = ...` does.
  bool states_are_in_place() const {
    bool moved = false;  // one branch at the end: no look waits for another one
    for (const StateEntry& state : states_) {
      moved |= state.tensor->unsafe_storage().unsafeGetStorageImpl() != state.storage;
#if !defined(FUSEDOPT_CUDA)  // where a storage can be moved into shared memory
      moved |= address_of(*state.tensor, state.tensor->itemsize()) != state.address;
#endif
    }
    return !moved;
  }

  static bool is_lazy(const c10::TensorImpl& tensor) {
    static const c10::DispatchKeySet lazy(
        {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});
    return tensor.key_set().has_any(lazy);
  }

  // Of a gradient's elements in the order of its parameter's, copied if need be.
  const void* address_in_order(c10::TensorImpl* grad, const Entry& entry) {
    const c10::TensorImpl& data = *entry.data;
    if (data.numel() == 0) return this;  // there is a gradient, but nothing to read
    if (!is_lazy(*grad) && same_layout(*grad, data)) return address_of(*grad, entry.grad_bytes);
    const c10::AutoGradMode no_grad(false);
    const auto original = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(grad));
    copies_.push_back(at::empty_strided(data.sizes(), data.strides(), original.options()));
    copies_.back().copy_(original);
    return copies_.back().data_ptr();
  }

  template <class T = float>
  T* scalar_pointer(const OptionalTensor& tensor, const char* name) const {
    if (!tensor) return nullptr;
    constexpr auto kDtype = c10::CppTypeToScalarType<T>::value;
    TORCH_CHECK(
        tensor->device() == device_ && tensor->scalar_type() == kDtype && tensor->numel() == 1,
        message(name, " must be one number, ", kDtype, " on ", device_, ", got ", tensor->sizes(),
                " ", tensor->scalar_type(), " on ", tensor->device()));
    return tensor->data_ptr<T>();
  }

  // What of the groups decides on states and signatures. Numbers count as zero or not (a schedule
  // may move momentum), all else as the object it is.
  struct Structure {
    std::vector<py::object> objects;
    std::vector<py::tuple> params;
    std::vector<const c10::TensorImpl*> tensors;  // of all params: swap_tensors() exchanges them
    std::vector<int64_t> numbers;
  };

  Structure read_structure(const py::list& groups) const {
    Structure found;
    visit_structure(
        groups,
        [&](PyObject* object) {
          found.objects.push_back(py::reinterpret_borrow<py::object>(object));
          return true;
        },
        [&](PyObject* params) {
          found.params.push_back(py::tuple(py::reinterpret_borrow<py::list>(params)));
          for (const py::handle& param : found.params.back()) {
            found.tensors.push_back(py::cast<at::Tensor>(param).unsafeGetTensorImpl());
          }
          return true;
        },
        [&](int64_t number) {
          found.numbers.push_back(number);
          return true;
        });
    return found;
  }

  // Until one of the functions says false.
  template <class OnObject, class OnParams, class OnNumber>
  bool visit_structure(const py::list& groups, OnObject on_object, OnParams on_params,
                       OnNumber on_number) const {
    for (const py::handle& group : groups) {
      PyObject* params = PyDict_GetItemWithError(group.ptr(), params_key_.ptr());
      TORCH_CHECK_VALUE(params != nullptr && PyList_Check(params), "a group has no list of params");
      if (!on_object(group.ptr()) || !on_params(params)) return false;
      for (const py::handle& key : structure_keys_) {
        PyObject* value = PyDict_GetItemWithError(group.ptr(), key.ptr());
        TORCH_CHECK_VALUE(value != nullptr, message("a parameter group has no ", py::str(key)));
        const bool is_number = PyFloat_Check(value) || PyLong_Check(value);
        if (!(is_number ? on_number(PyObject_IsTrue(value)) : on_object(value))) return false;
      }
    }
    return true;
  }

  // group dicts -> words: a tensor on a GPU is passed on as a pointer. Groups whose parameters are
  // all elsewhere are not looked at.
  void read_groups(const py::list& groups) {
    words_.clear();
    size_t index = 0;
    for (const py::handle& group : groups) {
      const size_t header = words_.size();
      if (!groups_used_[index++]) {
        words_.resize(header + group_size(), 0);
        continue;
      }
      words_.push_back(0);
      for (const py::handle& key : keys_) {
        PyObject* value = PyDict_GetItemWithError(group.ptr(), key.ptr());
        TORCH_CHECK_VALUE(value != nullptr, message("a parameter group has no ", py::str(key)));
        if (PyTuple_Check(value) || PyList_Check(value)) {
          const auto size = static_cast<int64_t>(PySequence_Fast_GET_SIZE(value));
          TORCH_CHECK_VALUE(
              size == 2,
              message(py::str(key), " must be a number, or two in betas, got ", py::repr(value)));
          for (int64_t i = 0; i < size; ++i) {
            push_value(PySequence_Fast_GET_ITEM(value, i), header, key);
          }
        } else {
          push_value(value, header, key);
        }
      }
      TORCH_CHECK_VALUE(words_.size() - header == static_cast<size_t>(group_size()),
                        message("a parameter group has ", words_.size() - header - 1,
                                " hyperparameters, expected ", group_size() - 1));
    }
  }

  void push_value(PyObject* value, size_t header, const py::handle& key) {
    py::detail::make_caster<at::Tensor> caster;
    if (!PyFloat_Check(value) && !PyLong_Check(value) && caster.load(value, false)) {
      const at::Tensor& tensor = caster;
      const bool is_double = tensor.scalar_type() == at::kDouble;
      const bool is_plain = !is_lazy(*tensor.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(
          tensor.numel() == 1,
          message(py::str(key), " must be one number, got a tensor of ", tensor.sizes()));
      if (tensor.device() == device_ && is_plain &&
          (is_double || tensor.scalar_type() == at::kFloat)) {
        const size_t i = words_.size() - header - 1;
        words_[header] |= (uint64_t{1} << i) | (uint64_t{is_double} << (32 + i));
        words_.push_back(reinterpret_cast<uint64_t>(tensor.data_ptr()));
        return;
      }
      if (device_.is_cuda() && tensor.is_cuda()) {  // of another device, or another dtype
        copies_.push_back(
            tensor.resolve_neg().to(at::TensorOptions(device_).dtype(at::kFloat), true));
        words_[header] |= uint64_t{1} << (words_.size() - header - 1);
        words_.push_back(reinterpret_cast<uint64_t>(copies_.back().data_ptr()));
        return;
      }
    }
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      TORCH_CHECK_VALUE(false, message(py::str(key), " must be a number, got ", py::repr(value)));
    }
    uint64_t word;
    std::memcpy(&word, &number, sizeof word);
    words_.push_back(word);
  }

  at::Device device_;
  py::str params_key_ = "params";
  py::tuple keys_, structure_keys_;
  Structure structure_;
  std::vector<char> groups_used_;
  uint32_t seed_;
  std::vector<const Kernels*> kernels_;
  std::vector<Entry> entries_;
  std::vector<StateEntry> states_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::vector<at::Tensor> kept_;  // what entries and rows point into, but parameters
  std::vector<c10::TensorImpl*> grad_impls_;
  std::vector<TensorRow> rows_;
  std::vector<Tiles> tiles_;  // of each signature
  const GradientKernels* gradient_kernels_ = nullptr;
  std::optional<Tiles> gradient_tiles_;
  SumOfSquares sum_;
  at::Tensor rows_table_, ready_, norm_total_;
  WordsOnDevice words_on_device_;
  std::vector<const void*> grads_;
  std::vector<OptionalTensor> given_;  // gradients that Python handed over, until they are used
  std::vector<at::Tensor> copies_;     // gradients laid out unlike their parameter
  std::vector<char> signature_used_;
  c10::DispatchKeySet plain_keys_;  // of the last gradient that had nothing unusual
  std::vector<uint64_t> words_;
  int64_t gathered_ = 0;
  bool captured_ = false;
};

}  // namespace
}  // namespace fusedopt

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using fusedopt::Plan;
  py::class_<Plan>(m, "Plan", py::module_local())
      .def(py::init<at::Device, py::tuple, py::tuple, const py::list&, std::vector<int64_t>,
                    uint32_t>(),
           py::arg("device"), py::arg("hyperparameters"), py::arg("structure"), py::arg("groups"),
           py::arg("kernels"), py::arg("seed"))
      .def("fits", &Plan::fits, py::arg("groups"))
      .def("watch", &Plan::watch, py::arg("param"))
      .def("add", &Plan::add, py::kw_only(), py::arg("param"), py::arg("data"),
           py::arg("grad_dtype"), py::arg("step"), py::arg("states"), py::arg("scales"),
           py::arg("master"), py::arg("master_scale"), py::arg("scaling"), py::arg("fp8_largest"),
           py::arg("group"), py::arg("signature"))
      .def("seal", &Plan::seal)
      .def("step", &Plan::step, py::arg("groups"), py::arg("max_grad_norm"), py::arg("grad_norm"))
      .def("gather", &Plan::gather, py::arg("grads"))
      .def("norm_sq", &Plan::norm_sq, py::arg("groups"), py::arg("found_inf"))
      .def("launch", &Plan::launch, py::arg("groups"), py::arg("grad_scale"), py::arg("found_inf"),
           py::arg("norm_sq"), py::arg("max_grad_norm"), py::arg("grad_norm"))
      .def("prepare_norm", &Plan::prepare_norm, py::arg("kernels"))
      .def_property_readonly("gathered", &Plan::gathered)
      .def_property_readonly("has_norm", &Plan::has_norm)
      .def_property_readonly("captured", &Plan::captured);
  using fusedopt::GradientList;
  using fusedopt::GradientLists;
  py::class_<GradientList>(m, "GradientList", py::module_local())
      .def("norm_sq", &GradientList::norm_sq)
      .def("clip", &GradientList::clip, py::arg("norm_sq"), py::arg("max_norm"));
  py::class_<GradientLists>(m, "GradientLists", py::module_local())
      .def(py::init<at::Device, int64_t>(), py::arg("device"), py::arg("kernels"))
      .def("of", &GradientLists::of, py::arg("params"))
      .def("make", &GradientLists::make, py::arg("grads"));
}
