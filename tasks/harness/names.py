"""Which module of this package has the names that scripts use."""

NAMES_BY_MODULE = {
    # Start and end a job.
    "job": "brief start",
    "flags": "Workload add_compile_flag add_model_flags gib make_parser natural positive rate"
    " sides_of",
    "environment": "check_writable fail read_environment",
    "processes": "ADDRESS PORT ended_together environment_of open_store variables wait_for_all",
    "watchdog": "catch_signals",
    # Compare: what may differ, and by how much.
    "tolerance": "LIMITS",
    "wider": "WIDER wider_copy",
    "float64": "Rotary64",
    # Compare: a model's text, one step of it, several steps.
    "generation": "check_continuation check_text encode_prompts hf_generate tokens_of",
    "model_checks": "check_overfitting compared_layers error_of_mean make_batch own_loss plain_loss"
    " number_of_parameters show_model train_on_batch",
    "sequence_checks": "check_attention show_sequence",
    "step_checks": "LARGE Reference check_copies compare_gradients compares_changes keep_changes"
    " refuse_not_finite refuse_rounding sum_of_parts",
    "adapter_checks": "check_again check_replicas check_training",
    # Measure.
    "measure": "REPEATS_HELP interleave limited_memory measure_costs num_threads"
    " peak_memory ratio say_if_short threads_alone",
    "memory_profile": "PARTS_OF_PEAK record_memory record_step trace_of write_trace",
    "budget": "error_of_loss limited_to_budget numbers_at_peak warm_up_adam",
    # Around training loops, which are in the scripts: epochs, Task 5's adapters, pretraining.
    "epochs": "bytes_held bytes_kept check_losses check_memory estimate expect_epochs"
    " expect_training losses_alone losses_of_epochs print_epoch print_pace print_workers"
    " record_epoch",
    "gradient_files": "GRADIENTS_FILE compare_files empty_folder write_gradients",
    "finetune": "adapter_config add_memory_flags each_alone follow identity_of_finetuning"
    " load_adapted possible_techniques read_text report_training save_result techniques_of warm_up"
    " within_budget",
    "pretraining": "ReferenceTraining check_fully_split check_long_loss export"
    " identity_of_pretraining make_mesh number_of_steps progress saving say_what_was_learnt",
}
