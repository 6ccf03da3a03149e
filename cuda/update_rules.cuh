// The algorithms: one plain struct each, fp32, one element at a time. A rule sees no index, no
// pointer and no dtype. `begin_step` derives in double what is constant over a tensor. If
// is_usual(), apply<kUsual = true> does the same with less arithmetic.
#pragma once

#include <cmath>

#include "precision.cuh"

namespace fusedopt {

// A term with a factor of zero is left out, since 0 * inf is nan. Both values are computed: a
// choice of two is what compilers make vector instructions of.
FUSEDOPT_HD float unless_zero(float factor, float with, float without) {
  return factor == 0 ? without : with;
}

// Adam (Kingma & Ba, 2015); decoupled weight decay (Loshchilov & Hutter, 2019); a third state makes
// it AMSGrad (Reddi et al., 2018).
struct Adam {
  struct Hyperparameters {
    double maximize, lr, beta1, beta2, eps, weight_decay, bias_correction, adam_w_mode;
  };
  static constexpr Role kRoles[] = {Role::kMoment, Role::kSecondMoment, Role::kMaximum};

  float decay, l2, lerp_weight, beta2, one_minus_beta2, root_factor, eps;

  FUSEDOPT_HD void begin_step(const Hyperparameters& group, double step) {
    const bool correct = group.bias_correction != 0;
    const double correction1 = correct ? 1 - pow(group.beta1, step) : 1;
    const double correction2 = correct ? 1 - pow(group.beta2, step) : 1;
    const bool decoupled = group.adam_w_mode != 0;
    decay = static_cast<float>(decoupled ? group.lr * group.weight_decay : 0);
    l2 = static_cast<float>(decoupled ? 0 : group.weight_decay);
    // As torch.lerp: from the nearer end, from the gradient if it is negative (or -0).
    lerp_weight = static_cast<float>(group.beta1 <= 0.5 ? -group.beta1 : 1 - group.beta1);
    beta2 = static_cast<float>(group.beta2);
    one_minus_beta2 = static_cast<float>(1 - group.beta2);
    // The step size divides the denominator instead of multiplying every quotient. Without one the
    // denominator is infinite.
    const double step_size = group.lr / correction1;
    const double factor = 1 / (sqrt(correction2) * step_size);
    const bool moves = factor < 1e38;
    root_factor = static_cast<float>(moves ? factor : 1);
    eps = static_cast<float>(moves ? group.eps / step_size : INFINITY);
  }

  FUSEDOPT_HD bool lerp_from_grad() const { return float_bits(lerp_weight) >> 31; }
  FUSEDOPT_HD bool is_usual() const { return l2 == 0 && !lerp_from_grad(); }

  template <int kStates, bool kUsual, class Math>
  FUSEDOPT_HD void apply(float& param, float grad, float (&state)[kMaxStates], Math& math) const {
    float& exp_avg = state[0];
    float& exp_avg_sq = state[1];
    param = unless_zero(decay, fused_multiply_add(-decay, param, param), param);
    if (!kUsual) grad = unless_zero(l2, fused_multiply_add(l2, param, grad), grad);
    const float base = !kUsual && lerp_from_grad() ? grad : exp_avg;
    exp_avg = fused_multiply_add(lerp_weight, grad - exp_avg, base);
    exp_avg_sq = fused_multiply_add(one_minus_beta2 * grad, grad, beta2 * exp_avg_sq);
    float second = exp_avg_sq;
    if constexpr (kStates == 3) second = state[2] = larger_or_nan(state[2], exp_avg_sq);
    const float denominator = math.denominator(math.sqrt(second), root_factor, eps);
    param = math.minus_quotient(param, exp_avg, denominator);
  }
};

// SGD with momentum (Sutskever et al., 2013, as torch.optim.SGD writes it). Without a state there
// is no momentum.
struct SGD {
  struct Hyperparameters {
    double maximize, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum;
  };
  static constexpr Role kRoles[] = {Role::kMoment};

  float lr, momentum, keep, take, decay_before, decay_after;
  bool nesterov;

  FUSEDOPT_HD void begin_step(const Hyperparameters& group, double step) {
    const bool first = step == 1;  // the buffer starts as the gradient itself, without dampening
    const bool after = group.wd_after_momentum != 0;
    lr = static_cast<float>(group.lr);
    momentum = static_cast<float>(group.momentum);
    keep = first ? 0 : momentum;
    take = static_cast<float>(first ? 1 : 1 - group.dampening);
    decay_before = static_cast<float>(after ? 0 : group.weight_decay);
    decay_after = static_cast<float>(after ? group.weight_decay : 0);
    nesterov = group.nesterov != 0;
  }

  FUSEDOPT_HD bool is_usual() const { return true; }

  template <int kStates, bool kUsual, class Math>
  FUSEDOPT_HD void apply(float& param, float grad, float (&state)[kMaxStates], Math&) const {
    grad = unless_zero(decay_before, fused_multiply_add(decay_before, param, grad), grad);
    if constexpr (kStates == 1) {
      float& momentum_buffer = state[0];
      momentum_buffer = fused_multiply_add(keep, momentum_buffer, take * grad);
      grad = nesterov ? fused_multiply_add(momentum, momentum_buffer, grad) : momentum_buffer;
    }
    grad = unless_zero(decay_after, fused_multiply_add(decay_after, param, grad), grad);
    param = fused_multiply_add(-lr, grad, param);
  }
};

// Lion (Chen et al., 2023): the sign of an interpolation, decoupled weight decay.
struct Lion {
  struct Hyperparameters {
    double maximize, lr, beta1, beta2, weight_decay;
  };
  static constexpr Role kRoles[] = {Role::kMoment};

  float lr, decay, keep1, take1, keep2, take2;

  FUSEDOPT_HD void begin_step(const Hyperparameters& group, double) {
    lr = static_cast<float>(group.lr);
    decay = static_cast<float>(group.lr * group.weight_decay);
    keep1 = static_cast<float>(group.beta1);
    take1 = static_cast<float>(1 - group.beta1);
    keep2 = static_cast<float>(group.beta2);
    take2 = static_cast<float>(1 - group.beta2);
  }

  FUSEDOPT_HD bool is_usual() const { return true; }

  template <int kStates, bool kUsual, class Math>
  FUSEDOPT_HD void apply(float& param, float grad, float (&state)[kMaxStates], Math&) const {
    float& exp_avg = state[0];
    const float update = fused_multiply_add(keep1, exp_avg, take1 * grad);
    exp_avg = fused_multiply_add(keep2, exp_avg, take2 * grad);
    param = unless_zero(decay, fused_multiply_add(-decay, param, param), param);
    param = param - lr * (update > 0 ? 1.0f : update < 0 ? -1.0f : update);  // 0 and nan stay
  }
};

}  // namespace fusedopt
