// Operations on tensors of the simulated GPU: checked as CUDA checks them, computed by the CPU's kernels.
#include "gpu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

namespace simulated_gpu {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;
constexpr auto CUDA = c10::DeviceType::CUDA;
const c10::DispatchKeySet ON_CPU(c10::DispatchKey::CPU);
const c10::DispatchKeySet ON_GPU(c10::DispatchKey::CUDA);

// For these the host waits for the device: their result decides a shape, or a Python number.
const std::set<std::string> WAITS = {
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::histc", "aten::multinomial",
    "aten::nonzero_static", "aten::repeat_interleave", "aten::linalg_cholesky_ex", "aten::argwhere",
};
// Operations whose index tensors may be on the host.
const std::set<std::string> INDEXES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                       "aten::index_put"};

bool on_gpu(const Tensor& t) { return t.defined() && t.is_cuda(); }

// The same memory as a tensor of the CPU, which does not own it: queued work keeps nothing alive.
Tensor host_alias(const Tensor& t) {
  if (!on_gpu(t)) return t;
  const auto& storage = t.storage();
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     c10::DataPtr(storage.mutable_data(), c10::Device(c10::DeviceType::CPU)),
                     c10::GetCPUAllocator(), /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), ON_CPU, t.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  return result;
}

void note_use(const Tensor& t, bool writes, c10::Stream stream, const std::string& by) {
  if (!on_gpu(t) || t.numel() == 0) return;
  int64_t first = t.storage_offset();
  int64_t last = first + 1;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  auto bytes = static_cast<int64_t>(t.itemsize());
  use(t.storage().data(), first * bytes, last * bytes, writes, stream, by);
}

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

at::ScalarType type_of(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  return at::detail::empty_strided_generic(size, stride, memory(), ON_GPU, type_of(dtype));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(index_of(device));
  return at::detail::empty_generic(size, memory(), ON_GPU, type_of(dtype), format);
}

// New memory of the device with the numbers of a tensor of the CPU.
Tensor to_gpu(const Tensor& found, c10::DeviceIndex device) {
  if (!found.defined() || found.is_cuda()) return found;
  auto result = empty_strided(found.sizes(), found.strides(), found.scalar_type(), std::nullopt,
                              c10::Device(CUDA, device), std::nullopt);
  host_alias(result).copy_(found);
  return result;
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  auto needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  auto storage = self.storage();
  if (storage.nbytes() < needed) {
    OnDevice on(self.device().index());
    auto data = memory()->allocate(needed);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage_(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  return set_storage_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_whole_storage_(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_(self, std::move(source), 0, {count}, {});
}

Tensor& set_empty_(Tensor& self) {
  OnDevice on(self.device().index());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, memory(), true);
  return set_storage_(self, std::move(none), 0, {0}, {});
}

void poison(const Tensor& t) {
  if (t.is_contiguous()) std::memset(t.mutable_data_ptr(), POISON, t.nbytes());
}

// A copy on, from or to the device. The host waits for one that is not `non_blocking`, and for one
// into host memory that is not page-locked.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.sizes() == source.sizes() && self.numel() == 0) return self;
  auto device = (on_gpu(self) ? self : source).device().index();
  auto stream = current_stream(device);
  bool crosses = on_gpu(self) != on_gpu(source);
  bool is_host_pinned = crosses && is_pinned(on_gpu(self) ? source.storage().data() : self.storage().data());
  note_use(source, false, stream, "aten::copy_");
  note_use(self, true, stream, "aten::copy_");
  auto to = host_alias(self);
  auto from = host_alias(source);
  auto copy = [to, from]() mutable { to.copy_(from); };
  if (on_gpu(self) && on_gpu(source)) {
    if (self.device() != source.device()) finish(current_stream(source.device().index()));
    submit(stream, copy);
  } else if (!non_blocking || (on_gpu(source) && !is_host_pinned)) {
    host_waits(on_gpu(self) ? "copy to the GPU" : "copy to the host");
    submit(stream, copy);
    finish(stream);
  } else if (on_gpu(self)) {
    // what is not page-locked, CUDA has read when the call returns
    if (!is_host_pinned) from = from.clone();
    submit(stream, [to, from]() mutable { to.copy_(from); });
  } else {
    // on a default stream the numbers are those of now, and arrive when the host waits for them
    if (!is_late(stream)) from = from.clone();
    poison(to);
    deliver(stream, [to, from]() mutable { to.copy_(from); });
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  auto stream = current_stream(self.device().index());
  note_use(self, false, stream, "item()");
  host_waits("item()");
  submit(stream, [] {});
  finish(stream);
  return host_alias(self).item();
}

void record_stream_(Tensor& self, c10::Stream stream) { record_stream(self.storage().data(), stream); }

// Torch's rule for the fused kernels of CUDA, whose mask is drawn as that of the CPU's dropout.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::empty(input.sizes(), input.options().dtype(at::kBool)).fill_(true)};
  auto kept = at::empty_like(input).bernoulli_(1 - p);
  return {input.mul(kept.div(1 - p)), kept.to(at::kBool)};
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                 double p, bool is_causal, std::optional<double> scale, bool is_grouped) {
  auto added = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, q.options()).masked_fill_(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, added, p, is_causal, std::nullopt, scale, is_grouped));
}

template <typename Function>
void each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector()) function(t);
  } else if (value.isList()) {
    for (const auto& item : value.toListRef())
      if (item.isTensor()) function(item.toTensor());
  }
}

// What an operation is given: its devices, and whether its tensors mix them as CUDA would not allow.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack)
      : schema_(op.schema()), given_(stack.end() - schema_.arguments().size(), stack.end()) {
    for (size_t i = 0; i < given_.size(); i++)
      each_tensor(given_[i], [&](const Tensor& t) { look(t, i); });
    std::string first = device_ < 0 ? "" : "cuda:" + std::to_string(device_);
    bool indexes = INDEXES.count(schema_.name()) && on_gpu(given_[0].toTensor());
    TORCH_CHECK(other_.empty() || (other_ == "cpu" && indexes),
                "Expected all tensors to be on the same device, but found at least two devices, ", first, " and ",
                other_, "! (argument ", other_name_, " of ", schema_.name(), ", on the simulated GPU)");
    if (indexes && !other_.empty()) host_waits("indices on the host in " + schema_.name());
    if (device_ < 0)
      for (const auto& value : given_)
        if (value.isDevice() && value.toDevice().is_cuda()) device_ = index_of(value.toDevice());
    if (device_ < 0) device_ = current_device();
    waits_ = WAITS.count(schema_.name()) != 0;
    if (indexes && schema_.name() != "aten::index") each_tensor(given_[1], [&](const Tensor& t) {
      waits_ |= on_gpu(t) && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
    });
  }

  c10::DeviceIndex device() const { return device_; }
  bool wait() const { return waits_; }
  const IValue& operator[](size_t i) const { return given_[i]; }
  size_t size() const { return given_.size(); }
  bool writes(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // The arguments for the CPU's kernel.
  std::vector<IValue> for_cpu() const {
    std::vector<IValue> result;
    for (size_t i = 0; i < given_.size(); i++) result.push_back(for_cpu(given_[i], i));
    return result;
  }

 private:
  void look(const Tensor& t, size_t argument) {
    if (!t.defined()) return;
    std::string other;
    if (t.is_cuda()) {
      if (device_ < 0) device_ = t.device().index();
      if (device_ != t.device().index()) other = t.device().str();
    } else if (t.is_cpu() && t.dim() > 0) {
      other = "cpu";
    }
    if (!other.empty() && other_.empty()) {
      other_ = other;
      other_name_ = schema_.arguments()[argument].name();
    }
  }

  IValue for_cpu(const IValue& value, size_t argument) const {
    if (value.isTensor()) return host_alias(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& t : value.toTensorVector()) tensors.push_back(host_alias(t));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& item : value.toListRef())
        tensors.push_back(item.isNone() ? std::optional<Tensor>() : host_alias(item.toTensor()));
      return tensors;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    // without a generator, random numbers are those of the device's
    const auto& type = schema_.arguments()[argument].type();
    if (value.isNone() && type->str() == "Generator?")
      return at::detail::getCUDAHooks().getDefaultGenerator(device_);
    return value;
  }

  const c10::FunctionSchema& schema_;
  std::vector<IValue> given_;
  c10::DeviceIndex device_ = -1;
  bool waits_ = false;
  std::string other_, other_name_;
};

// The result of a CPU kernel as a tensor of the device: new memory, or a view of an argument.
Tensor result_of(const Tensor& found, const Arguments& given) {
  if (!found.defined() || found.is_cuda()) return found;
  Tensor base;
  for (size_t i = 0; i < given.size() && found.numel(); i++)
    each_tensor(given[i], [&](const Tensor& t) {
      if (on_gpu(t) && t.storage().data() == found.storage().data()) base = t;
    });
  if (!base.defined()) return to_gpu(found, given.device());
  // with the base's keys, as torch's own views: a view without autograd's would be a tensor of inference mode
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), found.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides(), found.storage_offset());
  return view;
}

// An out= argument gets the shape that the CPU's kernel has given it.
void resize_like(const Tensor& out, const Tensor& found) {
  if (out.sizes() == found.sizes()) return;
  resize_(out, found.sizes(), std::nullopt);
  if (found.is_non_overlapping_and_dense())
    out.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides());
  host_alias(out).copy_(found);
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  Arguments given(op, *stack);
  auto stream = current_stream(given.device());
  touch(given.device());
  bool writes = false, has_shapes = true;
  for (size_t i = 0; i < given.size(); i++) {
    writes |= given.writes(i);
    // a kernel gives an empty out= its shape
    if (given.writes(i)) each_tensor(given[i], [&](const Tensor& t) { has_shapes &= t.numel() > 0; });
    each_tensor(given[i], [&](const Tensor& t) { note_use(t, given.writes(i), stream, schema.name()); });
  }
  auto arguments = given.for_cpu();
  torch::jit::drop(*stack, given.size());
  const auto& returns = schema.returns();

  bool is_queued = is_late(stream) && writes && has_shapes && !given.wait();
  if (is_queued) {
    submit(stream, [op, arguments] {
      Stack later(arguments);
      op.redispatchBoxed(ON_CPU, &later);
    });
  } else {
    if (given.wait()) host_waits(schema.name());
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    submit(stream, [&] { op.redispatchBoxed(ON_CPU, stack); });
    if (is_late(stream) || given.wait()) finish(stream);
  }

  std::vector<IValue> found;
  if (!is_queued) {
    found.assign(stack->end() - returns.size(), stack->end());
    torch::jit::drop(*stack, returns.size());
  }
  for (size_t r = 0; r < returns.size(); r++) {
    const auto* alias = returns[r].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t i = 0; i < given.size(); i++) {
        if (!given.writes(i) || !(*schema.arguments()[i].alias_info() == *alias)) continue;
        if (!is_queued && given[i].isTensor()) resize_like(given[i].toTensor(), arguments[i].toTensor());
        stack->push_back(given[i]);
        break;
      }
    } else if (is_queued) {
      TORCH_CHECK(false, "simulated GPU: ", schema.name(), " writes an argument and returns something new");
    } else if (found[r].isTensor()) {
      stack->push_back(result_of(found[r].toTensor(), given));
    } else if (found[r].isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& t : found[r].toTensorVector()) tensors.push_back(result_of(t, given));
      stack->push_back(tensors);
    } else {
      stack->push_back(found[r]);
    }
  }
}

Tensor host_view(const Tensor& self) { return host_alias(self); }

void use_of(const Tensor& self, bool writes, std::string by) {
  auto stream = current_stream(self.device().index());
  note_use(self, writes, stream, by);
  submit(stream, [] {});
}

void set_generator(int64_t device, std::optional<at::Generator> generator) {
  device_generator(static_cast<c10::DeviceIndex>(device)) = *generator;
}

}  // namespace

TORCH_LIBRARY(simulated_gpu, m) {
  m.def("host_view(Tensor self) -> Tensor", &host_view);
  m.def("use(Tensor self, bool writes, str by) -> ()", &use_of);
  m.def("set_generator(int device, Generator? generator) -> ()", &set_generator);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_);
  m.impl("set_.source_Storage", set_whole_storage_);
  m.impl("set_.source_Tensor", set_tensor_);
  m.impl("set_", set_empty_);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream_);
  m.impl("native_dropout", native_dropout);
  m.impl("scaled_dot_product_attention", attention);
  // whole, as the CPU computes them: torch would choose other kernels for CUDA, or create the result first
  for (const char* name : {"convolution", "convolution_backward", "_convolution", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", attention); }

}  // namespace simulated_gpu
