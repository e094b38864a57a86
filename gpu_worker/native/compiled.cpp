// loadonce::open, names, give, run: a step that torch's compiler made into a library. Called through torch's
// dispatcher, which lets go of Python's lock for as long as the step runs; torch's own binding doesn't.
#include <ATen/ops/clone.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <vector>

namespace loadonce {
namespace {

using torch::inductor::AOTIModelContainerRunnerCpu;

std::vector<std::unique_ptr<AOTIModelContainerRunnerCpu>>& opened() {
  static std::vector<std::unique_ptr<AOTIModelContainerRunnerCpu>> all;
  return all;
}

AOTIModelContainerRunnerCpu& at(int64_t handle) { return *opened().at(handle); }

int64_t open(const std::string& path) {
  opened().push_back(std::make_unique<AOTIModelContainerRunnerCpu>(path, 1));
  return static_cast<int64_t>(opened().size()) - 1;
}

std::vector<std::string> names(int64_t handle) {
  std::vector<std::string> found;
  for (const auto& [name, original] : at(handle).getConstantNamesToOriginalFQNs()) found.push_back(original);
  return found;
}

// The step reads the weights where they lie; the caller keeps them alive.
void give(int64_t handle, const std::vector<std::string>& originals, const std::vector<at::Tensor>& weights) {
  std::unordered_map<std::string, std::string> internal;
  for (const auto& [name, original] : at(handle).getConstantNamesToOriginalFQNs()) internal[original] = name;
  std::unordered_map<std::string, at::Tensor> map;
  for (size_t i = 0; i < originals.size(); ++i) map.emplace(internal.at(originals[i]), weights.at(i));
  at(handle).update_constant_buffer(map, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                    /*user_managed=*/true);
}

at::Tensor run(int64_t handle, const std::vector<at::Tensor>& inputs) { return at(handle).run(inputs).at(0); }

// A value that the compiler is to compute once and keep; what it sees through, it computes anew wherever it is used.
at::Tensor keep(const at::Tensor& value) { return value.clone(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(loadonce, library) {
  library.def("keep(Tensor value) -> Tensor");
  library.def("open(str path) -> int", &open);
  library.def("names(int handle) -> str[]", &names);
  library.def("give(int handle, str[] originals, Tensor[] weights) -> ()", &give);
  library.def("run(int handle, Tensor[] inputs) -> Tensor", &run);
}
TORCH_LIBRARY_IMPL(loadonce, CPU, library) { library.impl("keep", &keep); }

}  // namespace loadonce
