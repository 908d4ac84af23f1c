# ruff: noqa: E501 (names as libraries write them)
"""Kernels by their names, as their libraries spell them (pure)."""

import pytest

from paceline.observe.terms import TERM_ID, is_collective, is_peer_copy, kernel_term

NAMES = {
    "matmul": """
        void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(...)
        void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2>(T1::Params)
        void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>>>>(T1::Params)
        sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64
        nvjet_tst_128x256_64x4_1x2_h_bz_TNT
        ampere_sgemm_128x64_nn
        turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_stages_32x1_nn
        volta_scudnn_128x64_relu_interior_nn_v1
        void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int)
        void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int)
        void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1>(int)
        void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::W<float>)
        void cublasLt::splitKreduce_kernel<32, 16, int, float, float, true>(...)
        void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(...)
        void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024>(...)
        std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(...)
        void epilogue::impl::globalKernel<float, float>(int)
        Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1
        miopenSp3AsmConv_v30_3_1_gfx94x_fp16_dot2_edc_dilation2_group
        naive_conv_ab_nonpacked_fwd_nchw_half_double_half
        igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32
        _ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_
        void ck::kernel_moe_gemm_2lds<ck::GridwiseMoeGemm<ck::tensor_layout>>(ck::Argument)
        wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 4>(int, int)
        triton_tem_fused_addmm_3
        triton_mm
        _matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu
        _p_matmul_ogs_NNN_bf16xbf16xbf16_128x256x64x1
        fused_moe_kernel
        fused_moe_kernel_gptq_awq
        _w8a8_block_fp8_matmul
        matmul_kernel_persistent
        bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 1u, 64u, 128u>(float*)
        void marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8, 4, 8>(int4 const*)
        kgemm_4bit_inference_naive
        _ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock
    """,
    "attention": """
        void cutlass::device_kernel<flash::FlashAttnBwd<...>>
        void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<cutlass::gemm::X>>>(T)
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTma<cute::C<128>>>(T1)
        void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64>>(T)
        void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(P)
        fmha_cutlassF_bf16_aligned_64x64_rf_sm80
        fmha_cutlassB_f16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention::Params)
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16
        triton_tem_fused_flex_attention_2
        triton_tem_fused_flex_attention_backward_7
        attn_fwd.kd
        attn_bwd
        _attn_fwd
        _attn_bwd_dkdv
        bwd_kernel_dk_dv
        bwd_preprocess
        _fwd_kernel
        _fwd_grouped_kernel_stage1
        kernel_unified_attention_2d
        aiter::fmha_fwd_hd128_bf16_causal_group
        _ZN5aiter31fmha_bwd_hd128_bf16_causal_a32_rtz_psskE
        _ZN7ck_tile6kentryILi1ENS_13FmhaFwdKernelINS_24BlockFmhaPipelineQRKSVSAsyncE
        void ck_tile::kentry<256, 2, ck_tile::FmhaBwdDQDKDVKernel<ck_tile::X>>(T)
        void vllm::paged_attention_v2_reduce_kernel<__half, 128, 128, 512>(__half*)
        void vllm::merge_attn_states_kernel<float, 128>(float*)
        void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<0>>(P)
        void flashinfer::SinglePrefillWithKVCacheKernel<flashinfer::KernelTraits<0>>(P)
        void flashinfer::BatchDecodeWithPagedKVCacheKernel<0, 2u>(P)
        void flashinfer::MergeStateInPlaceKernel<8u, __half>(P)
        void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576>>(P)
        fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128
    """,
    "optimizer": """
        void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>>
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(T)
        void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>, float>(long)
        void adamw_kernel<float>(AdamWParams)
        void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 0, 256, 1>
        void transformer_engine::multi_tensor_adam::adam_kernel<float>(T)
    """,
    "exposed_comm": """
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)
        ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
        mscclKernel_Sum_half_LL128_Simple(ncclDevComm*)
        void deep_ep::internode_ll::dispatch<true, 7168>(void*)
        void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(void*)
        void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)
        void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>(aiter::RankData*)
        void transformer_engine::userbuffers_fp16_sum_inplace_gpu_rr<8>(int)
        void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(int)
        void two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(int)
        multimem_all_reduce_kernel
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<0>(P)
        void quickreduce::allreduce_prototype_twoshot<quickreduce::Codec>(T)
    """,
    "other_kernels.norm": """
        triton_red_fused_convolution_native_batch_norm_0
        triton_per_fused_native_layer_norm_add_3
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)
        void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>(long)
        void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long)
        void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>(float*)
        void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*)
        void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(float*)
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>(T)
        void at::native::(anonymous namespace)::max_pool_forward_nhwc<float>(float const*)
        void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 128, true, 1, true>(cudnnTensorStruct)
        MIOpenBatchNormFwdTrainSpatial
        void layer_norm::ln_bwd_finalize_kernel<layer_norm::Kernel_traits_finalize<1024u>>(P)
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<T>(P)
        scaled_upper_triang_masked_softmax_warp_forward
        cuApplyLayerNorm
        cuComputePartGradGammaBeta
        std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)
        void flashinfer::norm::FusedAddRMSNormKernel<8u, __half>(__half*)
        _layer_norm_fwd_1pass_kernel
        _rms_norm_forward_kernel
        liger_cross_entropy_kernel
        _ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassE
    """,
    "other_kernels.elementwise": """
        triton_poi_fused_all_gather_into_tensor_copy_wait_tensor_3
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int>(T)
        void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)
        void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheEnhancedParallelismKernel<true>(P)
        void flashinfer::activation::act_and_mul_kernel<__half, &(silu(float const&))>(__half*)
        void vllm::act_and_mul_kernel<c10::BFloat16, vllm::silu_kernel>(c10::BFloat16*)
        void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16>(c10::Float8_e4m3fn*)
        _per_token_group_quant_8bit
        _swiglu_forward_kernel
        _triton_rope
        fused_rope_forward_kernel
        kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>
        void moe::dev::activation::activationDeepSeekKernel<moe::dev::activation::KernelParams>(P)
        void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(float const*)
        _ZN2at6native54_GLOBAL__N__d8ceb000_21_DistributionNormal_cu_17e44f7d43distribution_elementwise_grid_stride_kernelIf
    """,
    "other_kernels.copy": """
        void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)
        void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(T)
        void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2>(T)
        void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops::P<float>)
        batched_transpose_32x32_half
        __amd_rocclr_copyBuffer
        __amd_rocclr_fillBufferAligned
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, 0>(P)
        void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, 0>(P)
        void flashinfer::AppendPagedKVCacheKernel<128u, 8u>(P)
    """,
    "other_kernels.embedding": """
        void fbgemm_gpu::permute_2D_data_kernel<false>(int)
        void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float>(T)
        void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 2ul>(T)
        void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float>(T)
        void permute_pooled_embs_kernel<float>(float const*)
        void bounds_check_indices_kernel<long, false>(T)
    """,
    "other_kernels.routing": """
        void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<cutlass::bfloat16_t, cutlass::bfloat16_t, false>>(P)
        void moe::dev::routing::routingIndicesHistogramKernel<moe::dev::routing::KernelParams<__nv_bfloat16>>(P)
        void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int>(float const*)
        void vllm::moe::moe_align_block_size_kernel<int>(int const*)
        void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__nv_bfloat16>(P)
        void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16>(P)
        void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)
        void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>>(int*)
        void at::native::mbtopk::radixFindKthValues<float, unsigned int, unsigned int>(T)
        void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(float*)
        _finalize_matmul_scatter_bf16
        _combined_routing_compute
        _permute_kernel
    """,
    "other_kernels": """
        my_own_secret_thing
        selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128>>(P)
    """,
}


@pytest.mark.parametrize(
    ("name", "term"),
    [(name.strip(), term) for term, names in NAMES.items() for name in names.strip().split("\n")],
)
def test_kernels_by_name(name, term):
    assert kernel_term(name) == term
    assert term in TERM_ID
    assert is_collective(name) == (term == "exposed_comm")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "_Z",
        "_ZN",
        "_ZN99999999999999999999a",
        ">>>",
        "((((",
        "a<b<c",
        "void ",
        "f<(>)>",
        "_ZN3abE",
    ],
)
def test_any_text_is_a_name(name):
    assert kernel_term(name) == "other_kernels"


def test_types_do_not_count():
    assert kernel_term("void f<cutlass::gemm::X, flash::Y>(nccl::Z, at::native::AdamFunctor)") == (
        "other_kernels"
    )


@pytest.mark.parametrize(
    ("name", "is_peer"),
    [
        ("Memcpy PtoP (Device -> Device)", True),
        ("CopyPeerToPeer", True),
        ("Memcpy DtoD (Device -> Device)", False),
        ("Memcpy HtoD (Pinned -> Device)", False),
    ],
)
def test_copies_between_devices(name, is_peer):
    assert is_peer_copy(name) == is_peer
