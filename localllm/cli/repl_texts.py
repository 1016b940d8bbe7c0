"""What the conversation's `/?` prints, and what it says where a model has nothing to show."""

HELP = """Available Commands:
  /set            Set session variables
  /show           Show model information
  /load <model>   Load a model, beginning a new conversation
  /save <model>   Save the model with the session's system message and parameters
  /clear          Clear session context
  /list           List models
  /bye            Exit
  /?, /help       Help for a command
  /? shortcuts    Help for keyboard shortcuts

Use \"\"\" to begin and end a multi-line message."""
SET_HELP = """Available Commands:
  /set parameter ...     Set a parameter
  /set system <string>   Set system message
  /set history           Enable history
  /set nohistory         Disable history
  /set wordwrap          Enable wordwrap
  /set nowordwrap        Disable wordwrap
  /set format json       Enable JSON mode
  /set noformat          Disable formatting
  /set verbose           Show statistics after each answer
  /set quiet             Hide statistics
  /set think             Enable thinking
  /set nothink           Disable thinking"""
PARAMETER_HELP = """Available Parameters:
  /set parameter seed <int>             Random number seed
  /set parameter num_predict <int>      Max number of tokens to predict
  /set parameter top_k <int>            Pick from top k num of tokens
  /set parameter top_p <float>          Pick token based on sum of probabilities
  /set parameter min_p <float>          Pick token based on top token probability * min_p
  /set parameter num_ctx <int>          Set the context size
  /set parameter temperature <float>    Set creativity level
  /set parameter repeat_penalty <float> How strongly to penalize repetitions
  /set parameter repeat_last_n <int>    Set how far back to look for repetitions
  /set parameter stop <string> ...      Set the stop parameters"""
SHOW_HELP = """Available Commands:
  /show info         Show details for this model
  /show license      Show model license
  /show modelfile    Show Modelfile for this model
  /show parameters   Show parameters for this model
  /show system       Show system message
  /show template     Show prompt template"""
SHORTCUTS = """Available keyboard shortcuts:
  Ctrl + a / e   Move to the beginning / end of the line
  Ctrl + k / u   Delete the text after / before the cursor
  Ctrl + w       Delete the word before the cursor
  Ctrl + j       New line inside a message
  Ctrl + l       Clear the screen
  Ctrl + g       Edit the message in an editor
  Ctrl + c       Stop the model from responding
  Ctrl + d       Exit (/bye)"""
TOPICS = {"set": SET_HELP, "show": SHOW_HELP, "shortcuts": SHORTCUTS}
MISSING = {
    "license": "No license was specified for this model.",
    "modelfile": "No Modelfile is known for this model.",
    "system": "No system message was specified for this model.",
    "template": "No prompt template was specified for this model.",
}
